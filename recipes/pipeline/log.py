"""What a pipeline says while it works: lines for people, or JSON lines for machines."""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from inferencex.cli.console import stderr_console
from inferencex.recipes.pipeline.base import Estimate, Step

if TYPE_CHECKING:
    from rich.status import Status

    from inferencex.recipes.pipeline.schedule import StepResult


class Log(Protocol):
    """Is told of each step."""

    def started(self, step: Step, estimate: Estimate) -> None:
        """Say that a step begins."""
        ...

    def ended(self, result: StepResult) -> None:
        """Say what became of a step."""
        ...

    def note(self, event: str, **fields: Any) -> None:
        """Say something about the whole run."""
        ...

    def close(self) -> None:
        """Nothing more will be said."""
        ...


class TextLog:
    """Lines on standard error; on a terminal the last one shows what is being done, and for how long."""

    def __init__(self) -> None:
        self._console = stderr_console()
        self._running: dict[str, float] = {}
        self._status: Status | None = None

    def started(self, step: Step, estimate: Estimate) -> None:
        """See `Log`."""
        self._running[step.id] = time.monotonic()
        expected = "" if estimate.seconds is None else f", about {duration(estimate.seconds)}"
        self._console.print(f"{step.id}: begins{expected}", markup=False)
        self._show()

    def ended(self, result: StepResult) -> None:
        """See `Log`."""
        self._running.pop(result.step.id, None)
        took = f" in {duration(result.seconds)}" if result.seconds else ""
        why = f": {result.message}" if result.message else ""
        self._console.print(f"{result.step.id}: {result.state}{took}{why}", markup=False)
        self._show()

    def note(self, event: str, **fields: Any) -> None:
        """See `Log`."""
        told = ", ".join(f"{name} {value}" for name, value in fields.items())
        self._console.print(f"{event}: {told}" if told else event, markup=False)

    def _show(self) -> None:
        if not self._console.is_terminal:
            return
        if self._status is None:
            self._status = self._console.status("")
            self._status.start()
        self._status.update(", ".join(self._running) or "waiting")

    def close(self) -> None:
        """See `Log`."""
        if self._status is not None:
            self._status.stop()


class JsonLog:
    """One JSON object a line, each with `time` and `event`."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout

    def started(self, step: Step, estimate: Estimate) -> None:
        """See `Log`."""
        self.note(
            "started",
            step=step.id,
            expected={"seconds": estimate.seconds, "memory": estimate.memory, "disk": estimate.disk},
        )

    def ended(self, result: StepResult) -> None:
        """See `Log`."""
        fields: dict[str, Any] = {"step": result.step.id, "state": result.state, "seconds": round(result.seconds, 3)}
        if result.message:
            fields["message"] = result.message
        if result.finished is not None:
            fields |= {"folder": str(result.finished.folder), "digest": result.finished.outcome.digest}
            fields["facts"] = result.finished.outcome.facts
        self.note("ended", **fields)

    def note(self, event: str, **fields: Any) -> None:
        """See `Log`."""
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **fields}
        self._stream.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """See `Log`."""


def duration(seconds: float) -> str:
    """Return seconds in words that are easy to read."""
    if seconds < 90:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"

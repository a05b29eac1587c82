"""How far a batch is: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_PLAIN_LINES = 10  # of a whole run


class BatchProgress:
    """Counts lines and tokens, and shows them on standard error."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        """Begin: `total` lines, of which an earlier run did `done`."""
        self._console = console
        self._total, self._done, self._tokens = total, done, 0
        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, completed=done, speed="")
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    @property
    def done(self) -> int:
        """Lines that are answered and written."""
        return self._done

    def add_tokens(self, count: int) -> None:
        """Count generated tokens."""
        self._tokens += count

    def advance(self) -> None:
        """Count a written line."""
        self._done += 1
        speed = f"{self._tokens / max(time.monotonic() - self._started, 1e-9):.1f} tokens/s"
        self._bar.update(self._task, completed=self._done, speed=speed)
        steps = _PLAIN_LINES * self._done // self._total, _PLAIN_LINES * (self._done - 1) // self._total
        if not self._console.is_terminal and steps[0] != steps[1]:
            self._console.print(f"{self._done} of {self._total} lines, {speed}")

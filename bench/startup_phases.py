"""One run of `inferencex-run` that says how long its phases took: the child process of `bench.startup`.

The command runs as it is, with a clock around the functions that its phases consist of. Time is counted once, in the
innermost phase: the backend's does not contain that of opening the bundle.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STARTED = "INFERENCEX_BENCH_STARTED"
"""The variable that says when the process was started, on the clock of `time.monotonic`, which all processes share."""


class PhaseClock:
    """Seconds by phase; a phase that begins inside another one interrupts it."""

    def __init__(self, started: float, phase: str) -> None:
        self.seconds: dict[str, float] = {phase: 0.0}
        self._stack = [phase]
        self._since = started

    def enter(self, phase: str) -> None:
        """Begin a phase inside the current one."""
        self._count()
        self.seconds.setdefault(phase, 0.0)
        self._stack.append(phase)

    def leave(self) -> None:
        """End the current phase and go on with the one around it."""
        self._count()
        self._stack.pop()

    def turn(self, phase: str) -> None:
        """End the current phase and begin another one in its place."""
        self.leave()
        self.enter(phase)

    def around(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """Return the function with its time counted as a phase, unless another thread calls it meanwhile."""

        def timed(*positional: Any, **named: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return function(*positional, **named)
            self.enter(phase)
            try:
                return function(*positional, **named)
            finally:
                self.leave()

        return timed

    def _count(self) -> None:
        now = time.monotonic()
        if self._stack:
            self.seconds[self._stack[-1]] += now - self._since
        self._since = now


def main() -> None:
    """Run the command with the arguments of this process; the last line of standard error is the phases as JSON."""
    clock = PhaseClock(float(os.environ[STARTED]), "interpreter")
    clock.turn("command line")
    from inferencex.runtime.cli import answer, command

    load, write = command.load, answer.write
    reported = False

    def load_in_phases(bundle: Path, engine: dict[str, Any]) -> Any:
        clock.turn("engine imports")
        from inferencex.runtime import llm
        from inferencex.runtime.backends import select_backend

        clock.turn("engine")
        for function, phase in (("_load_tokenizer", "tokenizer"), ("_import_engine", "engine imports")):
            setattr(llm, function, clock.around(getattr(llm, function), phase))
        selecting = clock.around(_with_phases(select_backend, clock), "backend imports")
        llm.select_backend = selecting  # type: ignore[attr-defined]
        loaded = load(bundle, engine)
        clock.turn("prompt and step")
        return loaded

    def write_and_report(text: str) -> None:
        nonlocal reported
        write(text)
        if not reported:
            reported = True
            clock.leave()
            print(json.dumps(clock.seconds), file=sys.stderr, flush=True)

    command.load, answer.write = load_in_phases, write_and_report
    sys.argv = ["inferencex-run", *sys.argv[1:], "--no-stats"]
    command.main()


def _with_phases(select: Callable[..., Any], clock: PhaseClock) -> Callable[..., Any]:
    """Count what the selected backend does to compile a bundle, and within that the checks of the bundle."""

    def selected(*positional: Any) -> Any:
        backend = select(*positional)
        from inferencex.formats.bundle import Bundle

        Bundle.open = clock.around(Bundle.open, "bundle checks")  # type: ignore[method-assign]
        backend.compile = clock.around(backend.compile, "backend")
        return backend

    return selected

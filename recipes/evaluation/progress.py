"""How far an evaluation is: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_PLAIN_LINES = 4  # of each piece of work


class Watcher(Protocol):
    """Hears how far the work is."""

    def advance(self, what: str, done: int, total: int) -> None:
        """Take note that `done` of `total` steps of `what` are behind."""

    def note(self, text: str) -> None:
        """Take note of something that is worth a line."""


class Unwatched:
    """Shows nothing."""

    def advance(self, what: str, done: int, total: int) -> None:
        """Show nothing."""

    def note(self, text: str) -> None:
        """Show nothing."""


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console

    def advance(self, what: str, done: int, total: int) -> None:
        if done == total or _PLAIN_LINES * done // total != _PLAIN_LINES * max(done - 1, 0) // total:
            self._console.print(f"{what}: {done} of {total}", markup=False)

    def note(self, text: str) -> None:
        self._console.print(text, markup=False)


class _Bars:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def advance(self, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done, total=total)

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False)


@contextmanager
def watcher(console: Console) -> Iterator[Watcher]:
    """Yield what shows progress on `console`."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield _Bars(progress)

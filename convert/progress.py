"""How a conversion shows its progress: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from inferencex.convert.stages import Observer


class _Lines:
    """One line for each stage and note."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def stage(self, name: str) -> None:
        self._console.print(f"{name} ...")

    def advance(self, done: int, total: int, what: str) -> None:
        if done == total or done % max(1, total // 4) == 0:
            self._console.print(f"  {done}/{total}")

    def note(self, text: str) -> None:
        self._console.print(f"note: {text}", markup=False)


class _Bar:
    """A live bar with the stage, the weight at work and the time gone."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def stage(self, name: str) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(name, total=None, what="")

    def advance(self, done: int, total: int, what: str) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=done, total=total, what=what[-48:])

    def note(self, text: str) -> None:
        self._progress.console.print(f"note: {text}", markup=False)


@contextmanager
def observer(console: Console) -> Iterator[Observer]:
    """Yield what shows progress on `console`."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (
        TextColumn("{task.description:>10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[what]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bar(progress)

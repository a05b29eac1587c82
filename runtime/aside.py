"""One piece of work, done at some time before its result is needed: on a thread of its own, or when it suits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Aside(Generic[T]):
    """Runs `work` on a thread at once.

    `concurrent.futures` does this too, with a pool, a queue and logging that take longer to import than some of the
    work; a command that answers one prompt feels it.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._results: list[T] = []
        self._error: BaseException | None = None
        # No daemon: an interpreter that ends waits for it, as native code that returns to none aborts the process.
        self._thread = threading.Thread(target=self._run, name="aside")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:  # raised again where the result is asked for
            self._error = error

    def wait(self, seconds: float | None = None) -> bool:
        """Return once the work has ended, well or not, or after so many seconds; tell whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> T:
        """Wait, and return what the work returned, or raise what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._results[0]


class Once(Generic[T]):
    """Does `work` when its result is first asked for; asked again, it returns the same."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._results: list[T] = []

    def result(self) -> T:
        """Return what the work returns; what it raises is raised, and it is tried again the next time."""
        if not self._results:
            self._results.append(self._work())
        return self._results[0]

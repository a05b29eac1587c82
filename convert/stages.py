"""The stages of a conversion: announced, and timed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol


class Observer(Protocol):
    """Is told how a conversion gets on."""

    def stage(self, name: str) -> None:
        """Begin a stage of the work."""
        ...

    def advance(self, done: int, total: int, what: str) -> None:
        """Within the stage, `done` of `total` units are finished, the last of them `what`."""
        ...

    def note(self, text: str) -> None:
        """Something a user should read."""
        ...


class Silent:
    """Shows nothing."""

    def stage(self, name: str) -> None:
        """Begin a stage of the work."""

    def advance(self, done: int, total: int, what: str) -> None:
        """Units of it are finished."""

    def note(self, text: str) -> None:
        """A note that nobody reads."""


@dataclass
class Stages:
    """Times the stages and announces them; the times of stages that come again add up."""

    observer: Observer
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Be in a stage as long as the context lasts."""
        self.observer.stage(name)
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

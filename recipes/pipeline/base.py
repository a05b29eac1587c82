"""The contract of a pipeline's steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

JsonObject = dict[str, Any]
State = Literal["done", "cached", "failed gate", "failed", "skipped"]


@dataclass(frozen=True)
class Estimate:
    """What a step is expected to take: seconds, bytes of memory at its peak, bytes on disk; None where unknown.

    measured: whether an earlier run of the same step says so, rather than a rule of thumb
    """

    seconds: float | None
    memory: int | None
    disk: int | None
    measured: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a step made.

    digest:  hash of what later steps depend on; equal inputs give equal digests
    facts:   figures for summaries and model cards, JSON without timings
    passed:  False for a gate that was not passed
    """

    digest: str
    facts: JsonObject = field(default_factory=dict)
    passed: bool = True


@dataclass(frozen=True)
class Finished:
    """A finished step: the folder of its outputs, and its outcome."""

    folder: Path
    outcome: Outcome


Inputs = Mapping[str, Finished]


class Step(ABC):
    """One node of the graph.

    A step's key is a hash of `ingredients()` and of the digests of `needs`. A step may be interrupted at any point
    and started again in the folder it left; `finish` alone decides that it is complete.
    """

    def __init__(self, kind: str, name: str, needs: tuple[str, ...], after: tuple[str, ...] = ()) -> None:
        self.kind = kind
        self.name = name
        self.needs = needs
        self.after = after

    @property
    def id(self) -> str:
        """The step's name in the graph, `convert:int4`."""
        return f"{self.kind}:{self.name}"

    @abstractmethod
    def ingredients(self) -> JsonObject:
        """Return all that the outputs depend on besides `needs`, as JSON."""

    @abstractmethod
    def estimate(self) -> Estimate:
        """Return a rule of thumb for what the step takes."""

    def command(self, folder: Path, inputs: Inputs, threads: int | None) -> list[str] | None:
        """Return the arguments of our own command that does the step; None when there is nothing to run."""
        return None

    @abstractmethod
    def finish(self, folder: Path, inputs: Inputs, status: int, log: str) -> Outcome:
        """Return the outcome once the command has ended with `status`; raises RecipeError when it failed.

        What a step does without a command, it does here; it is called in a thread.
        """

    def still_there(self, finished: Finished) -> bool:
        """Whether what the step did outside of its folder still holds."""
        return True

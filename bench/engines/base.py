"""The contract every engine fulfils: prepare a model once, load it, generate step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Capacity:
    """What an engine must have room for, so that none of them reserves more than the others.

    threads:        threads to compute with
    max_sequences:  most sequences in progress at once
    max_length:     longest sequence, prompt and answer together
    max_tokens:     most tokens held at once, all sequences together
    """

    threads: int
    max_sequences: int
    max_length: int
    max_tokens: int


class Session(Protocol):
    """A loaded model."""

    def generate(self, prompts: Prompts, max_tokens: int) -> Iterator[Sequence[int]]:
        """Continue every prompt greedily, all together, by exactly `max_tokens` tokens each.

        Yields after every step of the engine how many tokens each prompt has been continued by so far. Nothing
        is reused from earlier calls: a prompt is computed anew each time.
        """
        ...


class Engine(Protocol):
    """A way to run a checkpoint. Its module imports the engine's package only inside these methods."""

    name: str
    precision: str  # of the weights, as shown in tables
    settings: str  # how it is configured, one sentence

    def version(self) -> str:
        """Version of the installed package; ImportError when it is not there."""
        ...

    def prepare(self, checkpoint: Path, folder: Path) -> None:
        """Write to the empty `folder` whatever `load` reads, made from a checkpoint in the Hugging Face layout."""
        ...

    def load(self, folder: Path, capacity: Capacity) -> Session:
        """Load what `prepare` wrote."""
        ...

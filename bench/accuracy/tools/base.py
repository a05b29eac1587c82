"""The contract every tool fulfils: convert a checkpoint in a process of its own, then give logits of what it made."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

GROUP_SIZE = 64

Logits = Callable[[NDArray[np.int64]], NDArray[np.float32]]
"""Runs a model on one sequence: token ids int64 `[T]` -> logits float32 `[T, vocab]`."""

Activations = Literal["float32", "int8", "fp8"]


@dataclass(frozen=True)
class Row:
    """One row of the table.

    name:         of the row among those of its tool
    scheme:       method and format, as shown
    conversion:   what `Tool.convert` is asked for; rows that share one measure the same weights
    activations:  how the inputs of linears are read; int8 and fp8 are symmetric with a scale for every token
    floats:       whether weights are floating-point numbers of few bits, not integers
    """

    name: str
    scheme: str
    conversion: str
    activations: Activations = "float32"
    floats: bool = False


@dataclass(frozen=True)
class Task:
    """What every tool is given.

    checkpoint:  folder in the Hugging Face layout that all begin from
    token_ids:   file of what all calibrate on, int64 `[samples, length]`, as numpy saves it
    texts:       the text files that these ids were drawn from, for a tool that draws the same ids itself
    samples, length:  of the calibration
    window:      tokens of the sequences whose logits are asked for
    threads:     to compute with
    """

    checkpoint: Path
    token_ids: Path
    texts: tuple[Path, ...]
    samples: int
    length: int
    window: int
    threads: int

    def dump(self) -> str:
        """As JSON, for a command line."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def parse(cls, text: str) -> Task:
        """Read what `dump` wrote."""
        fields = json.loads(text)
        fields["texts"] = tuple(map(Path, fields["texts"]))
        return cls(**{**fields, "checkpoint": Path(fields["checkpoint"]), "token_ids": Path(fields["token_ids"])})

    def windows(self) -> NDArray[np.int64]:
        """Read the token ids, int64 `[samples, length]`."""
        windows: NDArray[np.int64] = np.load(self.token_ids)
        return windows


class Tool(Protocol):
    """A way to quantize a checkpoint. Its module imports the tool's package only inside these methods.

    All decoder linears are quantized, embedding and head are not; a tool that has groups uses `GROUP_SIZE`.
    """

    name: str
    settings: str  # what is common to its rows, one sentence
    rows: tuple[Row, ...]
    runs_itself: bool  # whether `load` and `bits` need the tool's package, and so run in its environment, not in ours

    def version(self) -> str:
        """Version of the installed package; ImportError when it is not there."""
        ...

    def convert(self, conversion: str, task: Task, folder: Path) -> None:
        """Write what was asked for to the empty `folder`. The process that does this is what is timed."""
        ...

    def bits(self, conversion: str, task: Task, folder: Path) -> float:
        """Bits that a weight of the decoder's linears takes in what `convert` wrote, scales and the like included."""
        ...

    def load(self, row: Row, task: Task, folder: Path) -> Logits:
        """Load what `convert` wrote."""
        ...

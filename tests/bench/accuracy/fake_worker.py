"""Stands in for the interpreter of a tool's environment: runs the worker with a tool that makes things up.

Its model's logits are 1 for the token itself, or what the conversion wrote for it, and 0 for all others.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.accuracy import worker
from bench.accuracy.tools.base import Logits, Row, Task

VOCAB = 32


def peaked(token_ids: NDArray[np.int64], height: float) -> NDArray[np.float32]:
    """Logits float32 `[T, VOCAB]`: `height` for the token itself, 0 for the others."""
    return height * np.eye(VOCAB, dtype=np.float32)[token_ids]


class Fake:
    name = "nncf"
    settings = "made up"
    rows = (Row("awq", "peaked", "awq"),)
    runs_itself = True

    def version(self) -> str:
        return "fake 1.2"

    def convert(self, conversion: str, task: Task, folder: Path) -> None:
        height = float(task.windows()[0, 0])
        if height < 0:
            raise RuntimeError("heights are above 0")
        (folder / "height.json").write_text(json.dumps(height))
        with (folder.parent / "conversions.txt").open("a") as file:
            file.write(f"{conversion}\n")

    def bits(self, conversion: str, task: Task, folder: Path) -> float:
        return 4.25

    def load(self, row: Row, task: Task, folder: Path) -> Logits:
        height = json.loads((folder / "height.json").read_text())
        if height == 13:
            raise RuntimeError("this model cannot be loaded")
        return lambda token_ids: peaked(token_ids, height)


if __name__ == "__main__":
    worker.find_tool = lambda name: Fake()  # type: ignore[assignment]
    worker.main(sys.argv[3:])  # behind `-m bench.accuracy.worker`

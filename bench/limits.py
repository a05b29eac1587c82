"""What this machine cannot exceed: int8 multiply-adds and memory reads, by a small C++ program compiled when needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("limits.cpp")


@dataclass(frozen=True)
class Limits:
    """Figures of all threads together; 0 where one could not be measured.

    A multiply-add counts as two operations. `instructions` names what reached the peak.
    """

    instructions: str
    int8_operations_per_second: float
    bytes_per_second: float

    def at_least(self, other: Limits) -> Limits:
        """The higher of both in each: what was reached once is possible, however busy the machine was later."""
        return Limits(
            self.instructions,
            max(self.int8_operations_per_second, other.int8_operations_per_second),
            max(self.bytes_per_second, other.bytes_per_second),
        )


NOT_MEASURED = Limits("none", 0.0, 0.0)


def measure_limits(threads: int, folder: Path) -> Limits:
    """Compile the program into `folder` and run it with `threads` threads; `NOT_MEASURED` without a compiler."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return NOT_MEASURED
    program = folder / "limits"
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([*compiler.split(), "-O3", "-std=c++20", "-pthread", SOURCE, "-o", program], check=True)
    output = subprocess.run([program, str(threads)], check=True, capture_output=True, text=True).stdout
    return Limits(**json.loads(output))

"""What decoding with quantized weights is expected to reach on an H200: a formula, and what it takes of machine code.

A weight of few bits costs instructions, which take as long as reading it does: `issue_limit` is the share of the
bandwidth at which they fill the chip. Predicted is `OVERLAP` of the smaller of that and what copies reach, for matrices
of 50 MB and more, which take so long that starting kernels is nothing.

`python -m bench.gpu.predictions` counts instructions anew and prints the table of docs/gpu.md; no GPU is needed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inferencex.runtime.backends.triton.weights import Format

BANDWIDTH = 4.8e12
"""Bytes a second of an H200's memory, by its data sheet."""

LANES = 132 * 128
"""Instructions of a thread that its multiprocessors issue in a cycle."""

CLOCK = 1.75e9
"""Cycles a second under load."""

COPIES_REACH = 0.93
"""Of the bandwidth."""

OVERLAP = 0.8
"""Of what the tighter limit allows, since instructions and reads do not overlap fully."""


@dataclass(frozen=True)
class Scheme:
    """A format of weights in the loop that decodes one token with them, on a 4096 x 4096 matrix.

    scales:       "float" (float16), "e5m3" or "e8m0"
    group:        0 for one scale a row
    instructions: for each weight, in the loop for sm_90 and bfloat16 activations
    """

    name: str
    format: Format
    group: int
    is_symmetric: bool
    scales: str
    instructions: float

    @property
    def bytes_per_weight(self) -> float:
        """Bytes that are read for a weight, with its share of scales and zero points."""
        bits = 4 if self.format in ("int4", "e2m1") else 8
        beside = (2 if self.scales == "float" else 1) + (not self.is_symmetric)
        return bits / 8 + (beside / self.group if self.group else 0)

    @property
    def issue_limit(self) -> float:
        """Share of the bandwidth at which instructions fill the chip; more than 1 where they never do."""
        return LANES * CLOCK / (BANDWIDTH / self.bytes_per_weight) / self.instructions

    @property
    def predicted(self) -> float:
        """Share of the bandwidth that is expected."""
        return OVERLAP * min(self.issue_limit, COPIES_REACH)


SCHEMES = (
    Scheme("INT4, groups of 128", "int4", 128, True, "float", 3.14),
    Scheme("INT4, groups of 128, zero points", "int4", 128, False, "float", 3.41),
    Scheme("INT4, groups of 64, zero points", "int4", 64, False, "float", 3.06),
    Scheme("INT4, groups of 32", "int4", 32, True, "float", 3.46),
    Scheme("INT4, groups of 32, zero points", "int4", 32, False, "float", 3.98),
    Scheme("INT8, a scale a row", "int8", 0, True, "float", 3.81),
    Scheme("INT8, groups of 32", "int8", 32, True, "float", 4.36),
    Scheme("FP8, a scale a row", "e4m3", 0, True, "float", 4.03),
    Scheme("NVFP4", "e2m1", 16, True, "e5m3", 4.61),
    Scheme("MXFP4", "e2m1", 32, True, "e8m0", 4.29),
)


def scheme(format: Format, group: int, *, is_symmetric: bool) -> Scheme:
    """Return the scheme of this format. Raises StopIteration for one that is not in the table."""
    return next(s for s in SCHEMES if (s.format, s.group, s.is_symmetric) == (format, group, is_symmetric))


@dataclass(frozen=True)
class Counted:
    """Instructions for each weight in a loop, and the tile of the program that has it."""

    instructions: float
    tile: str


def count(scheme: Scheme) -> Counted:
    """Compile the product with one token for sm_90, in its default configuration, and count the loop's instructions."""
    from bench.gpu.resources import compiled
    from inferencex.runtime.backends.triton.kernels.linear import decode_variant

    variant, config, panel = decode_variant(scheme.format, scheme.group, scheme.is_symmetric, scheme.scales)
    cubin = compiled(variant, "sm_90").asm["cubin"]
    loop = max(_loops(_machine_code(cubin)), key=len)
    weights = config["BLOCK_N"] * panel / (32 * config.num_warps)  # of a thread, in a turn
    return Counted(len(loop) / weights, f"{config['BLOCK_N']} x {config['BLOCK_T']}")


def _machine_code(cubin: bytes) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-sass", file.name], check=True, capture_output=True, text=True).stdout


def _loops(text: str) -> Iterator[list[str]]:
    """Yield the instructions between each branch backwards and where it goes."""
    found = [(int(m[1], 16), m[2]) for m in re.finditer(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", text, re.MULTILINE)]
    for place, instruction in found:
        branch = re.search(r"\bBRA\b.*\b(0x[0-9a-f]+)", instruction)
        if branch is not None and int(branch[1], 16) < place:
            yield [each for at, each in found if int(branch[1], 16) <= at <= place]


def main() -> int:
    """Print the table."""
    print("| weights | bytes a weight | tile | instructions a weight | issue limit | predicted |")
    print("|---|--:|--:|--:|--:|--:|")
    for each in SCHEMES:
        found = count(each)
        now = Scheme(each.name, each.format, each.group, each.is_symmetric, each.scales, found.instructions)
        print(
            f"| {now.name} | {now.bytes_per_weight:.3f} | {found.tile} | {now.instructions:.2f} | "
            f"{now.issue_limit:.0%} | {now.predicted:.0%} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How near linears with INT4 and INT8 weights come to the machine's limits.

    python -m bench.kernels.integer_linear [--threads 1 2] [--rows 1 2 4 8 16 32 128 512] [--bits 4] [--group 64]
                                           [--symmetric] [--gate] [--shapes 576x3072 ...]

Every shape `K x N` is measured with as many copies of its weight as no cache holds, one after the other, as a decoding
step reads them. A line states the time of one linear, its operations and the weight's bytes per second, and the
share of the limit: the longer of the times that the operations take at the measured peak of INT8 dot products and
the bytes at the measured bandwidth, divided by the time taken. The best repetition counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inferencex.runtime.backends.cpu.native import _cpu

UNCACHED_BYTES = 160 << 20
UNCACHED_ROWS = 32  # with more rows a linear takes so long that its weight's way from memory does not matter
REPETITIONS = 15


@dataclass(frozen=True)
class Case:
    """A weight `[channels, features]`, and whether its two halves are gated."""

    features: int
    channels: int
    bits: int
    group: int
    zero_points: bool
    gate: bool

    @property
    def attributes(self) -> dict[str, int | float | str | list[int]]:
        """Attributes of the operation, whose result is quantized again where it is gated."""
        plain: dict[str, int | float | str | list[int]] = {
            "channels": self.channels,
            "features": self.features,
            "bits": self.bits,
            "group": self.group,
            "signed": int(self.bits == 8),
        }
        if not self.gate:
            return plain
        return {**plain, "activation": "silu", "layout": "concat", "alpha": 1.0, "limit": 0.0, "out_group": self.group}


@dataclass(frozen=True)
class Limits:
    """What the machine can do: INT8 operations and bytes read, per second."""

    operations: float
    bytes: float


@dataclass(frozen=True)
class Measurement:
    """Seconds of one linear, the bytes and operations it is credited with, and seconds to pack its weight."""

    seconds: float
    bytes: float
    operations: float
    packing: float


def _constant(program: _cpu.Program, dtype: str, array: np.ndarray) -> _cpu.Operand:
    strides = [(stride // array.itemsize, 0) for stride in array.strides]
    return program.constant(dtype, [(size, 0) for size in array.shape], strides, 0, array)


def _rows_of(program: _cpu.Program, values: np.ndarray, blocks: int, random: np.random.Generator) -> list[_cpu.Operand]:
    rows = len(values)
    scales = random.uniform(0.01, 0.02, (rows, blocks)).astype(np.float32)
    sums = values.reshape(rows, blocks, -1).sum(2, dtype=np.int32)
    return [
        _constant(program, "i8", values),
        _constant(program, "f32", scales),
        _constant(program, "i32", sums),
    ]


def measure(case: Case, rows: int, threads: int) -> Measurement:
    """Run copies of a linear on random integers."""
    random = np.random.default_rng(0)
    program = _cpu.Program(threads)
    groups = -(-case.features // case.group)
    values = random.integers(0, 256, case.channels * case.features * case.bits // 8, dtype=np.uint8)
    weight = [
        _constant(program, "u8" if case.bits == 4 else "i8", values),
        _constant(program, "f16", random.uniform(0.01, 0.02, (case.channels, groups)).astype(np.float16)),
        _constant(program, "u8", random.integers(0, 256, (case.channels * groups + 1) // 2, dtype=np.uint8))
        if case.zero_points
        else None,
    ]
    copies = max(1, UNCACHED_BYTES // values.nbytes) if rows <= UNCACHED_ROWS else 1
    blocks, row_bytes = _cpu.block_layout(case.features, case.group)
    x = _rows_of(program, random.integers(-127, 128, (rows, row_bytes), dtype=np.int8), blocks, random)
    columns = case.channels // 2 if case.gate else case.channels
    results: list[_cpu.Operand | None] = [None] * 4
    if case.gate:
        out_blocks, out_bytes = _cpu.block_layout(columns, case.group)
        results[1:] = _rows_of(program, np.zeros((rows, out_bytes), np.int8), out_blocks, random)
    else:
        results[0] = _cpu.operand("f32", [(rows, 0), (columns, 0)], [(columns, 0), (1, 0)], 0)
    for copy in range(copies):
        program.add("IntegerLinear", f"linear {copy}", [*x, *weight], results, case.attributes)
    nothing = _cpu.operand("f32", [(0, 0), (0, 0)], [(0, 0), (0, 0)], 0)
    began = time.perf_counter()
    program.prepare(4 * rows * columns, rows, {}, nothing, 1, 16)
    packing = (time.perf_counter() - began) / copies
    program.run()
    program.set_profiling(True)
    runs = np.zeros(REPETITIONS)
    copy_seconds = np.zeros((REPETITIONS + 1, copies))
    for repetition in range(REPETITIONS):
        began = time.perf_counter()
        program.run()
        runs[repetition] = time.perf_counter() - began
        copy_seconds[repetition + 1] = [step[3] for step in program.profile()]
    _, _, calls, _, size, operations = program.profile()[0]
    # Other processes disturb single copies; but with several threads one copy's clock may start after its work has.
    best_copies = float(np.diff(copy_seconds, axis=0).min(axis=0).mean())
    seconds = best_copies if threads == 1 else float(runs.min()) / copies
    return Measurement(seconds, size / calls, operations / calls, packing)


def _print_case(case: Case, rows: Sequence[int], threads: int, limits: Limits) -> None:
    for count in rows:
        found = measure(case, count, threads)
        needed = max(found.bytes / limits.bytes, found.operations / limits.operations)
        print(
            f"{case.features:6d} x {case.channels:<6d} rows {count:4d}  {found.seconds * 1e6:9.1f} us"
            f"  {found.operations / found.seconds / 1e12:6.3f} TOPS  {found.bytes / found.seconds / 1e9:6.1f} GB/s"
            f"  {needed / found.seconds:5.0%} of the limit  packed in {found.packing * 1e3:.2f} ms",
            flush=True,
        )


def main() -> None:
    """Measure the shapes that were asked for, on each number of threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 128, 512])
    parser.add_argument("--bits", type=int, choices=[4, 8], default=4)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--symmetric", action="store_true", help="weights without zero points")
    parser.add_argument("--gate", action="store_true", help="gate the two halves of the result and quantize it")
    parser.add_argument("--shapes", nargs="+", default=["576x3072", "1536x576", "576x960"], metavar="KxN")
    arguments = parser.parse_args()
    for threads in arguments.threads:
        peak, bandwidth = _cpu.measure_integer_peak(threads), _cpu.measure_bandwidth(threads, 128 << 20)
        limits = Limits(peak, bandwidth)
        print(f"{_cpu.chosen_isa()}, {threads} threads: {peak / 1e12:.3f} TOPS, {bandwidth / 1e9:.1f} GB/s")
        for shape in arguments.shapes:
            features, channels = (int(size) for size in shape.split("x"))
            case = Case(
                features,
                channels,
                arguments.bits,
                arguments.group,
                not arguments.symmetric and arguments.bits == 4,
                arguments.gate,
            )
            _print_case(case, arguments.rows, threads, limits)


if __name__ == "__main__":
    main()

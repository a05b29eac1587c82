"""How near attention comes to the machine's limits.

    python -m bench.kernels.attention [--threads 1 2] [--contexts 512 1024 2048 4096] [--step 1024] [--sequences 1]
                                      [--kv-dtype bfloat16 int8 float32] [--shapes 9x3x64 32x8x64 ...]

A shape is query heads x key-value heads x head width. Each context's last `step` tokens are one step, queries rotated,
as the engine computes a prompt; `--step 1` decodes, every one of `--sequences` its own context. A line states the time
of one step, multiply-adds of the pairs of queries and keys that see each other and bytes of keys and values per second,
and the share of the limit: the longer of the times that the operations take at the peak of dot products and the bytes
at the measured bandwidth, divided by the time taken. The peak is the one measured for INT8, of which dot products of
bfloat16 do half and of floats a quarter with registers as wide. The best repetition counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferencex.runtime.backends.cpu.native import _cpu

BLOCK_SIZE = 16
REPETITIONS = 9
INT8_PER_OPERATION = {"bfloat16": 2, "int8": 2, "float32": 4, "float16": 4}


@dataclass(frozen=True)
class Case:
    """A layer's heads, and a step that brings each of `sequences` the last `step` tokens of its context."""

    heads: int
    kv_heads: int
    width: int
    kv_dtype: str
    context: int
    step: int
    sequences: int

    @property
    def blocks(self) -> int:
        """Of all sequences."""
        return -(-self.context // BLOCK_SIZE) * self.sequences

    @property
    def attributes(self) -> dict[str, int | float | str | list[int]]:
        """Of StoreKV and Attention."""
        return {
            "num_kv_heads": self.kv_heads,
            "key_width": self.width,
            "value_width": self.width,
            "block_size": BLOCK_SIZE,
            "num_blocks": self.blocks,
            "kv_dtype": self.kv_dtype,
            "num_heads": self.heads,
            "scale": self.width**-0.5,
        }


def _constant(program: _cpu.Program, array: NDArray[Any]) -> _cpu.Operand:
    dtype = {np.dtype(np.float32): "f32", np.dtype(np.int64): "i64", np.dtype(np.uint8): "u8"}[array.dtype]
    offset = 0 if array.base is None else array.ctypes.data - array.base.ctypes.data
    strides = [(stride // array.itemsize, 0) for stride in array.strides]
    whole = array if array.base is None else array.base
    return program.constant(dtype, [(size, 0) for size in array.shape], strides, offset, whole)


def _pool(case: Case) -> NDArray[np.uint8]:
    size = _cpu.state_bytes(case.blocks, BLOCK_SIZE, case.kv_heads, case.width, case.width, case.kv_dtype)
    space = np.zeros(size + 64, np.uint8)
    start = -space.ctypes.data % 64
    return space[start : start + size]


def measure(case: Case, threads: int) -> tuple[float, float, float]:
    """Return seconds of one step, its operations, and the bytes that it reads and writes."""
    random = np.random.default_rng(0)
    pool, places = _pool(case), np.arange(case.context)
    blocks = random.permutation(case.blocks).astype(np.int32).reshape(case.sequences, -1)
    contexts = np.full(case.sequences, case.context, np.int32)
    angles = places[:, None] / 10000.0 ** (np.arange(case.width // 2) * 2 / case.width)
    nothing = _cpu.operand("f32", [(0, 0), (0, 0)], [(0, 0), (0, 0)], 0)

    def prepared(
        kind: str, count: int, heads: Sequence[int], more: Sequence[None], y: int
    ) -> Callable[[], _cpu.Program]:
        """A program of one operation on the last `count` tokens of each sequence, ready to run."""
        program = _cpu.Program(threads)
        positions = np.tile(places[case.context - count :], case.sequences)
        rows = [random.standard_normal((len(positions), n, case.width), dtype=np.float32) for n in heads]
        tables: list[NDArray[Any]] = [
            np.cos(angles).astype(np.float32),
            np.sin(angles).astype(np.float32),
            positions.astype(np.int64),
            pool,
        ]
        inputs = [*(_constant(program, x) for x in rows), *more, *(_constant(program, x) for x in tables)]
        results = [_constant(program, np.zeros((len(positions), y), np.float32))] if y else []
        program.add(kind, kind, inputs, results, case.attributes)
        program.prepare(64, len(positions), {}, nothing, case.blocks, BLOCK_SIZE)
        offsets = (np.arange(case.sequences + 1) * count).astype(np.int32)

        def run() -> _cpu.Program:
            program.run(len(positions), 1, positions.astype(np.int32), offsets, contexts, blocks)
            return program

        return run

    prepared("StoreKV", case.context, [case.kv_heads] * 2, [], 0)()
    attend = prepared("Attention", case.step, [case.heads], [None, None], case.heads * case.width)
    attend().set_profiling(True)
    times = []
    for _ in range(REPETITIONS):
        began = time.perf_counter()
        program = attend()
        times.append(time.perf_counter() - began)
    _, _, calls, _, size, operations = program.profile()[0]
    return min(times), operations / calls, size / calls


def main() -> None:
    """Measure the shapes that were asked for, on each number of threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--step", type=int, default=1024, help="tokens of a step; at most the context")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument(
        "--kv-dtype", nargs="+", choices=list(INT8_PER_OPERATION), default=["bfloat16", "int8", "float32"]
    )
    parser.add_argument("--shapes", nargs="+", default=["9x3x64", "32x8x64"], metavar="HxGxD")
    arguments = parser.parse_args()
    for threads in arguments.threads:
        peak, bandwidth = _cpu.measure_integer_peak(threads), _cpu.measure_bandwidth(threads, 128 << 20)
        print(f"{_cpu.chosen_isa()}, {threads} threads: {peak / 1e12:.3f} TOPS of INT8, {bandwidth / 1e9:.1f} GB/s")
        for shape in arguments.shapes:
            heads, kv_heads, width = (int(size) for size in shape.split("x"))
            for kv_dtype in arguments.kv_dtype:
                for context in arguments.contexts:
                    step = min(arguments.step, context)
                    case = Case(heads, kv_heads, width, kv_dtype, context, step, arguments.sequences)
                    seconds, operations, size = measure(case, threads)
                    needed = max(operations * INT8_PER_OPERATION[kv_dtype] / peak, size / bandwidth)
                    print(
                        f"{shape:>8s} {kv_dtype:8s} context {context:5d} step {step:4d}  {seconds * 1e6:9.1f} us"
                        f"  {operations / seconds / 1e9:7.1f} GOPS  {size / seconds / 1e9:6.1f} GB/s"
                        f"  {needed / seconds:5.0%} of the limit",
                        flush=True,
                    )


if __name__ == "__main__":
    main()

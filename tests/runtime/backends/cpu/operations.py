"""Run one operation of the native module on numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferencex.runtime.backends.base import StepBatch
from inferencex.runtime.backends.cpu.native import _cpu

Array = NDArray[Any]

_TYPES = {
    np.dtype(np.float32): "f32",
    np.dtype(np.float16): "f16",
    np.dtype(np.uint16): "bf16",
    np.dtype(np.int64): "i64",
    np.dtype(np.int32): "i32",
    np.dtype(np.int8): "i8",
    np.dtype(np.uint8): "u8",
    np.dtype(np.bool_): "bool",
}


@dataclass(frozen=True)
class Typed:
    """An array whose element type numpy does not tell: bits of `f8e4m3`, say."""

    array: Array
    dtype: str


Argument = Array | Typed | _cpu.Region | None


def operand(program: _cpu.Program, argument: Argument) -> _cpu.Operand | None:
    """Return an operand that lies where the array does, strides included."""
    if argument is None:
        return None
    if isinstance(argument, _cpu.Region):
        return _cpu.Program.region_operand(argument)
    array, dtype = (argument.array, argument.dtype) if isinstance(argument, Typed) else (argument, "")
    base = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert base.flags.c_contiguous and all(stride >= 0 for stride in array.strides)
    offset = array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return program.constant(
        dtype or _TYPES[array.dtype],
        [(size, 0) for size in array.shape],
        [(stride // array.itemsize, 0) for stride in array.strides],
        offset,
        base,
    )


def run_operation(
    kind: str,
    inputs: Sequence[Argument],
    outputs: Sequence[Argument],
    attributes: Mapping[str, Any],
    *,
    batch: StepBatch | None = None,
    threads: int = 1,
    isa: str | None = None,
    max_tokens: int = 1024,
) -> None:
    """Run `kind` once; results are written into `outputs`. Raises `_cpu.BlueprintError` as the operation does."""
    program = _cpu.Program(threads, isa=isa)
    places = [operand(program, item) for item in outputs]
    program.add(kind, "test", [operand(program, item) for item in inputs], places, dict(attributes))
    finish(program, max_tokens)
    if batch is None:
        program.run()
        return
    program.run(
        len(batch.token_ids),
        len(batch.logit_rows),
        batch.positions,
        batch.sequence_offsets,
        batch.context_lengths,
        batch.block_tables,
    )


def finish(program: _cpu.Program, max_tokens: int = 1024) -> None:
    """Prepare a program whose operands are all constants."""
    nothing = _cpu.operand("f32", [(0, 0), (0, 0)], [(0, 0), (0, 0)], 0)
    program.prepare(64, max_tokens, {}, nothing, 1 << 20, 16)

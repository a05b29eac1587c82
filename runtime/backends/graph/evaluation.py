"""One node executed on arrays by ONNX's own reference evaluator, unless its result would be absurdly large."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferencex.formats.errors import BackendError
from inferencex.formats.graph import Node
from inferencex.runtime.backends.graph.well_formed import label_of

Array = NDArray[Any]
_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)

_MOST_ELEMENTS = 1 << 28
"""Of a result that is not made of as many: 1 GB of float32, beyond any table that a graph computes."""


def evaluate(node: Node, inputs: Sequence[Array | None]) -> tuple[Array, ...]:
    """Execute one node on arrays. Raises BackendError naming it when ONNX's reference cannot, or for absurd sizes."""
    # Here, for most graphs need no fallback, and onnx.reference takes longer to import than to lower one.
    from inferencex.runtime.backends.onnx_node import evaluate_node

    _check_growth(node, inputs)
    try:
        return evaluate_node(node.proto, inputs)
    except _FAILURES as error:
        raise BackendError(f"{label_of(node)} cannot be executed: {error or type(error).__name__}") from error


def _check_growth(node: Node, inputs: Sequence[Array | None]) -> None:
    """Refuse to make something huge out of next to nothing."""
    try:
        size = _result_size(node.op_type, [array for array in inputs if array is not None])
    except _FAILURES:
        return  # operands that do not go together: the execution says so
    if size > max(_MOST_ELEMENTS, 4 * sum(array.size for array in inputs if array is not None)):
        raise BackendError(f"{label_of(node)} would make {size} elements; the limit is {_MOST_ELEMENTS}")


def _result_size(op_type: str, arrays: Sequence[Array]) -> int:
    """Return how many elements a result has, for operators that make more of them than they get."""
    first = arrays[0]
    if op_type == "Range":
        start, limit, step = (float(array.reshape(-1)[0]) for array in arrays)
        return int((limit - start) / step)
    if op_type == "ConstantOfShape":
        return math.prod(int(size) for size in first)
    if op_type == "Tile":
        return int(first.size) * math.prod(int(count) for count in arrays[1])
    if op_type == "Pad":
        before, after = np.split(arrays[1], 2)
        return math.prod(size + int(a) + int(b) for size, a, b in zip(first.shape, before, after, strict=True))
    if op_type == "OneHot":
        return int(first.size) * int(arrays[1].reshape(-1)[0])
    if op_type in ("MatMul", "Gemm"):
        shared = max(int(first.shape[-1]), 1)
        return (int(first.size) // shared) * (int(arrays[1].size) // shared)
    shapes = [first.shape, tuple(int(size) for size in arrays[1])] if op_type == "Expand" else [a.shape for a in arrays]
    return math.prod(max(sizes) for sizes in itertools.zip_longest(*(shape[::-1] for shape in shapes), fillvalue=1))

"""Tables that the graph computes from constants: those of rotary embeddings, row by row of positions.

`onnx.reference` could evaluate them too; it takes longer to import than the tables to compute, and computes every row,
where a shorter `max_model_len` needs only the first ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferencex.formats.dtypes import DataType
from inferencex.formats.graph import Node, Value

Array = NDArray[Any]

_FUNCTIONS: dict[str, Callable[[Array], Array]] = {"Cos": np.cos, "Sin": np.sin}


_DEEPEST = 8  # operators from the range of positions to a table; more are not those of a rotary embedding


def table_rows(value: Value, rows: int, constant: Callable[[Value], Array], depth: int = 0) -> Array | None:
    """Compute the first `rows` rows of a table; None where it is not made of the operators that are known here.

    `constant(value)` returns the elements of an initializer. Elements have the types that ONNX gives them.
    """
    node = value.producer()
    if node is None or node.domain != "" or depth > _DEEPEST:
        return None
    if node.op_type == "Range":
        return _range(node, rows, constant)
    if node.op_type == "Mul":
        return _product(node, rows, constant, depth)
    source = node.inputs[0] if node.inputs else None
    if source is None or node.op_type not in ("Cos", "Sin", "Cast", "Unsqueeze"):
        return None
    array = table_rows(source, rows, constant, depth + 1)
    if array is None:
        return None
    if node.op_type == "Cast":
        return array.astype(DataType(node.attributes.get_int("to")).numpy())
    if node.op_type == "Unsqueeze":
        axes = node.inputs[1] if len(node.inputs) > 1 else None
        is_column = array.ndim == 1 and axes is not None and axes.constant is not None and axes.numpy().tolist() == [1]
        return array[:, None] if is_column else None
    return _FUNCTIONS[node.op_type](array) if array.dtype == np.float32 else None


def _range(node: Node, rows: int, constant: Callable[[Value], Array]) -> Array | None:
    bounds = [None if value is None or value.constant is None else constant(value) for value in node.inputs]
    if any(bound is None or bound.size != 1 or bound.dtype != np.int64 for bound in bounds):
        return None
    start, limit, step = (int(bound.reshape(-1)[0]) for bound in bounds if bound is not None)
    return np.arange(min(rows, limit), dtype=np.int64) if (start, step) == (0, 1) and limit >= 0 else None


def _product(node: Node, rows: int, constant: Callable[[Value], Array], depth: int) -> Array | None:
    factors: list[Array] = []
    for value in node.inputs:
        if value is None:
            return None
        if value.is_initializer:
            array = constant(value)
            if array.ndim > 2 or (array.ndim == 2 and len(array) != 1):  # it has rows of its own
                return None
        else:
            computed = table_rows(value, rows, constant, depth + 1)
            if computed is None:
                return None
            array = computed
        if array.dtype != np.float32:
            return None
        factors.append(array)
    return factors[0] * factors[1]

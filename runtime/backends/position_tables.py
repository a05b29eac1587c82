"""Whether a graph's tables have a row for every position that its manifest promises."""

from __future__ import annotations

from collections.abc import Iterator

from inferencex.formats.errors import BundleError
from inferencex.formats.graph import Graph, Value

_RESHAPES = ("Reshape", "Unsqueeze", "Squeeze", "Identity", "Cast")


def check_positions(graph: Graph, max_model_len: int, where: str) -> None:
    """Raise BundleError, naming the table, when one that is read by position has less than `max_model_len` rows.

    These are the tables of RoPE and the learned or computed ones that are looked up with `positions`, which may be
    shifted by a constant.
    """
    for table, offset in _tables(graph):
        rows = table.shape[0] if table.shape else None
        if isinstance(rows, int) and rows < max_model_len + offset:
            raise BundleError(
                f"{where}: {table.name} has {rows} rows, for sequences of {rows - offset} tokens, and bundle.json says "
                f"architecture.max_model_len is {max_model_len}; convert the model again"
            )


def _tables(graph: Graph) -> Iterator[tuple[Value, int]]:
    """Yield the tables and the row of position 0 in each."""
    for node in graph:
        if node.domain != "":
            continue
        if node.op_type == "RotaryEmbedding" and len(node.inputs) > 3:
            offset = _offset(node.inputs[3])
            tables = [table for table in node.inputs[1:3] if table is not None and len(table.shape or ()) == 2]
        elif node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 0:
            offset = _offset(node.inputs[1])
            tables = [table for table in node.inputs[:1] if table is not None and table.is_initializer]
        else:
            continue
        if offset is not None:
            yield from ((table, offset) for table in tables)


def _offset(index: Value | None) -> int | None:
    """Return `c` when an index is `positions + c`, in any shape; None when it is anything else."""
    offset = 0
    while index is not None:
        node = index.producer()
        if node is None:
            return offset if index.name == "positions" and not index.is_initializer else None
        if node.domain != "":
            return None
        index = node.inputs[0]
        if node.op_type == "Add":
            left, right = node.inputs
            shift, index = (_scalar(right), left) if _scalar(right) is not None else (_scalar(left), right)
            if shift is None:
                return None
            offset += shift
        elif node.op_type not in _RESHAPES:
            return None
    return None


def _scalar(value: Value | None) -> int | None:
    if value is None or value.constant is None:
        return None
    array = value.numpy()
    return int(array.reshape(-1)[0]) if array.size == 1 else None

"""Which parameters a weight expression puts together, where rows of parameters can say it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
from torch import Tensor

from inferencex.convert.passes.editing import attribute
from inferencex.convert.passes.weights import WeightExpression
from inferencex.formats.bundle.origins import WeightOrigin, WeightPart

_UNCHANGED = ("Identity", "Cast")


@dataclass(frozen=True)
class _Rows:
    """A value as rows of parameters."""

    parts: tuple[WeightPart, ...]
    shape: tuple[int, ...]


def origin_of(expression: WeightExpression, shape_of: Callable[[str], Sequence[int]]) -> WeightOrigin:
    """Follow an expression from its parameters to its result; `shape_of(name)` is a parameter's shape.

    Concatenation and slicing along the first axis, transposition of the last two, and an added number are followed;
    everything else is named in `computed_by` and leaves no parts.
    """
    known: dict[str, _Rows] = {}
    for name in expression.parameters:
        shape = tuple(shape_of(name))
        known[name] = _Rows((WeightPart(name, 0, shape[0] if shape else 1),), shape)
    operators: dict[str, None] = {}
    for node in expression.nodes:
        results = _follow(node, known, expression.constants)
        if results is None:
            operators[node.op_type] = None
            continue
        known.update({str(output.name): rows for output, rows in zip(node.outputs, results, strict=True)})
    found = known.get(expression.output)
    return WeightOrigin((), tuple(operators)) if found is None else WeightOrigin(found.parts)


def _follow(node: ir.Node, known: dict[str, _Rows], constants: dict[str, Tensor]) -> list[_Rows] | None:
    inputs = [None if value is None else known.get(str(value.name)) for value in node.inputs]
    first = inputs[0]

    def numbers(place: int) -> list[float] | None:
        value = node.inputs[place] if len(node.inputs) > place else None
        constant = None if value is None else constants.get(str(value.name))
        return None if constant is None else [float(number) for number in constant.reshape(-1).tolist()]

    if node.op_type == "Concat":
        present = [rows for rows in inputs if rows is not None]
        if len(present) < len(inputs) or attribute(node, "axis", 0) not in (0, -len(present[0].shape)):
            return None
        total = sum(rows.shape[0] for rows in present)
        return [_Rows(tuple(part for rows in present for part in rows.parts), (total, *present[0].shape[1:]))]
    if node.op_type in ("Add", "Sub"):
        return _added(node.op_type, first, inputs[1], numbers(0), numbers(1))
    if first is None or not first.shape:
        return None
    rank = len(first.shape)
    if node.op_type in _UNCHANGED:
        return [first]
    if node.op_type == "Transpose":
        return _transposed(first, list(attribute(node, "perm", list(range(rank))[::-1])))
    if node.op_type == "Split" and attribute(node, "axis", 0) in (0, -rank):
        sizes = numbers(1)
        if sizes is None:
            return None
        ends = [int(sum(sizes[: place + 1])) for place in range(len(sizes))]
        return [_slice(first, end - int(size), end) for end, size in zip(ends, sizes, strict=True)]
    if node.op_type == "Slice":
        starts, ends_, axes, steps = numbers(1), numbers(2), numbers(3), numbers(4) or [1.0]
        if starts is None or ends_ is None or axes not in ([0.0], [float(-rank)]) or steps != [1.0]:
            return None
        start, end, _ = slice(int(starts[0]), int(ends_[0])).indices(first.shape[0])
        return [_slice(first, start, max(start, end))]
    return None


def _added(
    op_type: str, a: _Rows | None, b: _Rows | None, a_numbers: list[float] | None, b_numbers: list[float] | None
) -> list[_Rows] | None:
    """Follow `rows + number`, `number + rows` and `rows - number`."""
    rows, constant = (a, b_numbers) if a is not None else (b, a_numbers)
    if rows is None or constant is None or len(set(constant)) != 1 or len(constant) not in (1, rows.shape[-1]):
        return None
    if op_type == "Sub" and a is None:
        return None
    number = constant[0] if op_type == "Add" else -constant[0]
    return [replace(rows, parts=tuple(replace(part, added=part.added + number) for part in rows.parts))]


def _transposed(rows: _Rows, perm: list[int]) -> list[_Rows] | None:
    """Follow an exchange of the last two axes of whole parameters."""
    rank = len(rows.shape)
    if rank < 2 or perm != [*range(rank - 2), rank - 1, rank - 2] or (rank == 2 and len(rows.parts) != 1):
        return None
    shape = (*rows.shape[:-2], rows.shape[-1], rows.shape[-2])
    if rank > 2:
        return [_Rows(tuple(replace(part, transposed=not part.transposed) for part in rows.parts), shape)]
    part = rows.parts[0]
    if part.start != 0 or part.rows != rows.shape[0]:
        return None
    return [_Rows((replace(part, rows=shape[0], transposed=not part.transposed),), shape)]


def _slice(rows: _Rows, start: int, end: int) -> _Rows:
    parts = []
    place = 0
    for part in rows.parts:
        low, high = max(start, place), min(end, place + part.rows)
        if low < high:
            parts.append(replace(part, start=part.start + low - place, rows=high - low))
        place += part.rows
    return _Rows(tuple(parts), (end - start, *rows.shape[1:]))

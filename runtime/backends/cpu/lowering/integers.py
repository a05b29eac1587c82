"""Integers that describe shapes: known when lowering, up to the size of a step, and never computed in one."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from inferencex.formats.dtypes import DataType
from inferencex.formats.graph import Node, Value
from inferencex.runtime.backends.cpu.lowering.context import Lowering, input_of
from inferencex.runtime.backends.cpu.lowering.extents import Extent

Integers = tuple[Extent, ...] | Extent


def known_integers(lowering: Lowering, value: Value | None) -> Integers | None:
    """Return the integers of a value of at most one dimension, or None where they are not known."""
    if value is None:
        return None
    if value.name in lowering.integers:
        return lowering.integers[value.name]
    if value not in lowering.static or value.dtype not in (DataType.INT64, DataType.INT32, None):
        return None
    array = lowering.static.array(value)
    if array.dtype.kind not in "iu" or array.ndim > 1 or array.size > 64:
        return None
    if array.ndim == 0:
        return Extent(int(array))
    return tuple(Extent(int(item)) for item in array)


def integer_list(lowering: Lowering, value: Value | None) -> list[int] | None:
    """Return integers that are the same in every step, or None."""
    known = known_integers(lowering, value)
    if known is None:
        return None
    entries = (known,) if isinstance(known, Extent) else known
    if not all(entry.is_constant for entry in entries):
        return None
    return [entry.coefficient for entry in entries]


def evaluate_integers(lowering: Lowering, node: Node) -> bool:
    """Compute a node whose result is known integers; False where it is not one."""
    if node.domain != "" or len(node.outputs) != 1:
        return False
    function = _FUNCTIONS.get(node.op_type)
    if function is None:
        return False
    if node.op_type != "Shape" and not any(
        value is not None and value.name in lowering.integers for value in node.inputs
    ):
        return False
    result = function(lowering, node)
    if result is None:
        return False
    lowering.integers[node.outputs[0].name] = result
    return True


def _shape(lowering: Lowering, node: Node) -> Integers | None:
    source = node.inputs[0]
    if source is None or source.name not in lowering.views:
        return None
    dims = lowering.views[source.name].dims
    start = node.attributes.get_int("start", 0)
    end = node.attributes.get_int("end", len(dims))
    return dims[slice(start, end)]


def _all(lowering: Lowering, node: Node) -> list[Integers] | None:
    known = [known_integers(lowering, value) for value in node.inputs]
    return None if any(item is None for item in known) else [item for item in known if item is not None]


def _concat(lowering: Lowering, node: Node) -> Integers | None:
    parts = _all(lowering, node)
    if parts is None or any(isinstance(part, Extent) for part in parts):
        return None
    return tuple(entry for part in parts if not isinstance(part, Extent) for entry in part)


def _same(lowering: Lowering, node: Node) -> Integers | None:
    return known_integers(lowering, node.inputs[0])


def _cast(lowering: Lowering, node: Node) -> Integers | None:
    to = node.attributes.get_int("to")
    return _same(lowering, node) if to in (DataType.INT64, DataType.INT32) else None


def _to_list(lowering: Lowering, node: Node) -> Integers | None:
    known = known_integers(lowering, node.inputs[0])
    return (known,) if isinstance(known, Extent) else None


def _to_scalar(lowering: Lowering, node: Node) -> Integers | None:
    known = known_integers(lowering, node.inputs[0])
    return known[0] if known is not None and not isinstance(known, Extent) and len(known) == 1 else None


def _reshape(lowering: Lowering, node: Node) -> Integers | None:
    known, shape = known_integers(lowering, node.inputs[0]), integer_list(lowering, input_of(node, 1))
    if known is None or shape is None:
        return None
    entries = (known,) if isinstance(known, Extent) else known
    if not shape:
        return entries[0] if len(entries) == 1 else None
    return entries if len(shape) == 1 else None


def _gather(lowering: Lowering, node: Node) -> Integers | None:
    data, index = known_integers(lowering, node.inputs[0]), known_integers(lowering, node.inputs[1])
    if data is None or isinstance(data, Extent) or index is None:
        return None
    places = (index,) if isinstance(index, Extent) else index
    if not all(place.is_constant and -len(data) <= place.coefficient < len(data) for place in places):
        return None
    picked = tuple(data[place.coefficient] for place in places)
    return picked[0] if isinstance(index, Extent) else picked


def _slice(lowering: Lowering, node: Node) -> Integers | None:
    data = known_integers(lowering, node.inputs[0])
    bounds = [integer_list(lowering, input_of(node, place)) for place in (1, 2)]
    steps = integer_list(lowering, input_of(node, 4)) if input_of(node, 4) is not None else [1]
    if data is None or isinstance(data, Extent) or bounds[0] is None or bounds[1] is None or steps is None:
        return None
    return data[slice(bounds[0][0], bounds[1][0], steps[0])]


def _product(lowering: Lowering, node: Node) -> Integers | None:
    parts = _all(lowering, node)
    if parts is None:
        return None
    left, right = parts
    if isinstance(left, Extent) and isinstance(right, Extent):
        return left * right
    if isinstance(left, Extent):
        return None if isinstance(right, Extent) else tuple(left * entry for entry in right)
    if isinstance(right, Extent):
        return tuple(entry * right for entry in left)
    if len(left) != len(right):
        return None
    return tuple(a * b for a, b in zip(left, right, strict=True))


def _difference(sign: int) -> Callable[[Lowering, Node], Integers | None]:
    def compute(lowering: Lowering, node: Node) -> Integers | None:
        parts = _all(lowering, node)
        if parts is None or not all(isinstance(part, Extent) for part in parts):
            return None
        left, right = parts
        assert isinstance(left, Extent) and isinstance(right, Extent)
        if left.symbol is not right.symbol and left.coefficient and right.coefficient:
            return None
        return Extent.of(left.coefficient + sign * right.coefficient, left.symbol or right.symbol)

    return compute


_FUNCTIONS: dict[str, Callable[[Lowering, Node], Integers | None]] = {
    "Shape": _shape,
    "Concat": _concat,
    "Cast": _cast,
    "Identity": _same,
    "Unsqueeze": _to_list,
    "Squeeze": _to_scalar,
    "Reshape": _reshape,
    "Gather": _gather,
    "Slice": _slice,
    "Mul": _product,
    "Add": _difference(1),
    "Sub": _difference(-1),
}


@lru_cache(maxsize=1024)  # a graph has few shapes, many times
def target_dims(known: Integers | None, source: tuple[Extent, ...], *, allow_zero: bool) -> tuple[Extent, ...] | None:
    """Return the dimensions that Reshape's shape input asks for: 0 copies one of the source's, -1 is what is left."""
    if known is None:
        return None
    entries = (known,) if isinstance(known, Extent) else known
    dims: list[Extent | None] = []
    for place, entry in enumerate(entries):
        if entry.is_constant and entry.coefficient == 0 and not allow_zero:
            if place >= len(source):
                return None
            dims.append(source[place])
        else:
            dims.append(None if entry.is_constant and entry.coefficient == -1 else entry)
    if dims.count(None) > 1:
        return None
    given = Extent(1)
    for size in dims:
        given = given * size if size is not None else given
    total = Extent(1)
    for size in source:
        total = total * size
    rest = total.divided_by(given)
    if rest is None or (None not in dims and rest != Extent(1)):
        return None
    return tuple(rest if size is None else size for size in dims)

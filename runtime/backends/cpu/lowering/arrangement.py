"""Operators that rearrange a tensor: views of what is there, and a copy only where a view cannot express it."""

from __future__ import annotations

from collections.abc import Callable

from inferencex.formats.graph import Node
from inferencex.runtime.backends.cpu.lowering.context import Lowering, input_of
from inferencex.runtime.backends.cpu.lowering.extents import ONE, Extent
from inferencex.runtime.backends.cpu.lowering.integers import integer_list, known_integers, target_dims
from inferencex.runtime.backends.cpu.lowering.views import View, broadcast_dims

Handler = Callable[[Lowering, Node], bool]


def _reshape_to(lowering: Lowering, node: Node, dims: tuple[Extent, ...]) -> bool:
    source = lowering.view(node.inputs[0])
    view = source.reshaped(dims)
    if view is None:
        view = lowering.contiguous(source, node.outputs[0].name).reshaped(dims)
    if view is None:
        return False
    lowering.views[node.outputs[0].name] = view
    return True


def _reshape(lowering: Lowering, node: Node) -> bool:
    known = known_integers(lowering, input_of(node, 1))
    allow_zero = bool(node.attributes.get_int("allowzero", 0))
    dims = target_dims(known, lowering.view(node.inputs[0]).dims, allow_zero=allow_zero)
    return dims is not None and _reshape_to(lowering, node, dims)


def _axes(lowering: Lowering, node: Node, rank: int) -> list[int] | None:
    axes = integer_list(lowering, input_of(node, 1))
    if axes is None or any(not -rank <= axis < rank for axis in axes):
        return None
    return sorted(axis % rank for axis in axes)


def _unsqueeze(lowering: Lowering, node: Node) -> bool:
    source = lowering.view(node.inputs[0])
    asked = integer_list(lowering, input_of(node, 1))
    axes = None if asked is None else _axes(lowering, node, source.rank + len(asked))
    if axes is None:
        return False
    dims = list(source.dims)
    for axis in axes:
        dims.insert(axis, ONE)
    return _reshape_to(lowering, node, tuple(dims))


def _squeeze(lowering: Lowering, node: Node) -> bool:
    source = lowering.view(node.inputs[0])
    if input_of(node, 1) is None:
        axes: list[int] | None = [i for i, size in enumerate(source.dims) if size == ONE]
    else:
        axes = _axes(lowering, node, source.rank)
    if axes is None:
        return False
    return _reshape_to(lowering, node, tuple(size for i, size in enumerate(source.dims) if i not in axes))


def _flatten(lowering: Lowering, node: Node) -> bool:
    source = lowering.view(node.inputs[0])
    axis = node.attributes.get_int("axis", 1) % (source.rank + 1)
    before, after = ONE, ONE
    for size in source.dims[:axis]:
        before = before * size
    for size in source.dims[axis:]:
        after = after * size
    return _reshape_to(lowering, node, (before, after))


def _transpose(lowering: Lowering, node: Node) -> bool:
    source = lowering.view(node.inputs[0])
    order = node.attributes.get_ints("perm", list(range(source.rank))[::-1])
    if sorted(order) != list(range(source.rank)):
        return False
    lowering.views[node.outputs[0].name] = source.transposed(order)
    return True


def _identity(lowering: Lowering, node: Node) -> bool:
    lowering.views[node.outputs[0].name] = lowering.view(node.inputs[0])
    return True


def _expand(lowering: Lowering, node: Node) -> bool:
    source, shape = lowering.view(node.inputs[0]), known_integers(lowering, input_of(node, 1))
    if shape is None:
        return False
    wanted = (shape,) if isinstance(shape, Extent) else shape
    try:
        view = source.broadcast_to(broadcast_dims([source.dims, wanted]))
    except ValueError:
        return False
    lowering.views[node.outputs[0].name] = view
    return True


def _split(lowering: Lowering, node: Node) -> bool:
    source = lowering.view(node.inputs[0])
    axis = node.attributes.get_int("axis", 0)
    if not -source.rank <= axis < source.rank:
        return False
    axis %= source.rank
    size = source.dims[axis]
    if not size.is_constant:
        return False
    if input_of(node, 1) is not None:
        sizes = integer_list(lowering, input_of(node, 1))
    else:
        count = len(node.outputs)
        each = -(-size.coefficient // count)
        sizes = [min(each, max(size.coefficient - i * each, 0)) for i in range(count)]
    if sizes is None or len(sizes) != len(node.outputs) or sum(sizes) != size.coefficient or min(sizes) < 0:
        return False
    start = 0
    for value, part in zip(node.outputs, sizes, strict=True):
        view = _part(lowering, node, source, axis, start, Extent(part))
        if view is None:
            return False
        lowering.views[value.name] = view
        start += part
    return True


def _part(lowering: Lowering, node: Node, source: View, axis: int, start: int, size: Extent) -> View | None:
    """Return a slice of an axis; one in front of the tokens starts where a step decides, and is copied out."""
    view = source.sliced(axis, start, size)
    if view is not None:
        return view
    front = list(range(source.rank))
    front.remove(axis)
    # With the axis innermost every other stride is larger, and the slice starts at a fixed place.
    moved = lowering.contiguous(source.transposed([*front, axis]), node.outputs[0].name)
    part = moved.sliced(source.rank - 1, start, size)
    if part is None:
        return None
    back = list(range(source.rank - 1))
    back.insert(axis, source.rank - 1)
    return part.transposed(back)


def _slice(lowering: Lowering, node: Node) -> bool:
    view = lowering.view(node.inputs[0])
    starts, ends = (integer_list(lowering, input_of(node, place)) for place in (1, 2))
    if starts is None or ends is None or len(starts) != len(ends):
        return False
    axes = integer_list(lowering, input_of(node, 3)) if input_of(node, 3) is not None else list(range(len(starts)))
    steps = integer_list(lowering, input_of(node, 4)) if input_of(node, 4) is not None else [1] * len(starts)
    if axes is None or steps is None or len(axes) != len(starts) or len(steps) != len(starts):
        return False
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step < 1 or not -view.rank <= axis < view.rank:
            return False
        axis %= view.rank
        size = view.dims[axis]
        if not size.is_constant:
            if start == 0 and end > 1 << 31 and step == 1:  # all of it
                continue
            return False
        first, last, _ = slice(start, end).indices(size.coefficient)
        part = _part(lowering, node, view, axis, first, Extent(max(last - first, 0)))
        if part is None:
            return False
        view = part.every(axis, step)
    lowering.views[node.outputs[0].name] = view
    return True


def _constant_gather(lowering: Lowering, node: Node) -> bool:
    """Lower a Gather whose index is one number to a view."""
    if node.inputs[0] in lowering.static:
        return False
    source, index = lowering.view(node.inputs[0]), known_integers(lowering, input_of(node, 1))
    axis = node.attributes.get_int("axis", 0)
    if not isinstance(index, Extent) or not index.is_constant or not -source.rank <= axis < source.rank:
        return False
    axis %= source.rank
    size = source.dims[axis]
    if not size.is_constant or not -size.coefficient <= index.coefficient < size.coefficient:
        return False
    part = _part(lowering, node, source, axis, index.coefficient % size.coefficient, ONE)
    if part is None:
        return False
    squeezed = View(
        part.storage,
        part.dtype,
        part.dims[:axis] + part.dims[axis + 1 :],
        part.strides[:axis] + part.strides[axis + 1 :],
        part.offset,
    )
    lowering.views[node.outputs[0].name] = squeezed
    return True


HANDLERS: dict[str, Handler] = {
    "Reshape": _reshape,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Flatten": _flatten,
    "Transpose": _transpose,
    "Identity": _identity,
    "Expand": _expand,
    "Split": _split,
    "Slice": _slice,
    "Gather": _constant_gather,
}

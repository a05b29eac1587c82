"""Operators that rearrange a tensor."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from inferencex.formats.graph import Node
from inferencex.runtime.parallel.parts import (
    Part,
    Ranges,
    clipped,
    count,
    from_indices,
    indices,
    reshaped,
    shifted,
    union,
)
from inferencex.runtime.parallel.rules.contract import (
    Facts,
    Needs,
    Parts,
    Rule,
    broadcast,
    first,
    input_shape,
    only_whole,
    output_shape,
    unchanged,
)


def _reshape(node: Node, parts: Parts, facts: Facts) -> Needs | None:
    """Reshape, Squeeze, Unsqueeze and Flatten."""
    part, source, target = first(parts), input_shape(node, 0, facts), output_shape(node, facts)
    needed = None if source is None or target is None else reshaped(part, target, source)
    if needed is None or target is None:
        return None
    inputs = (needed, *unchanged(node, facts)[1:])
    if node.op_type != "Reshape":
        return Needs(inputs)
    given = facts.constant(node.inputs[1])
    if given is None:
        if sum(not isinstance(size, int) for size in target) > 1:
            return None
        given = np.array([size if isinstance(size, int) else -1 for size in target], dtype=np.int64)
    shape = [int(size) if ranges is None else count(ranges) for size, ranges in zip(given, part, strict=True)]
    return Needs(inputs, constants={1: np.array(shape, dtype=np.int64)})


def _transpose(node: Node, parts: Parts, facts: Facts) -> Needs | None:
    part = first(parts)
    order = list(node.attributes.get_ints("perm", list(range(len(part)))[::-1]))
    needed: list[Ranges | None] = [None] * len(part)
    for axis, source in enumerate(order):
        needed[source] = part[axis]
    return Needs((tuple(needed),))


def _expand(node: Node, parts: Parts, facts: Facts) -> Needs | None:
    part, source, target = first(parts), input_shape(node, 0, facts), output_shape(node, facts)
    if source is None or target is None:
        return None
    given = facts.constant(node.inputs[1])
    behind = len(target) - len(source)
    shape: list[int] = []
    for axis, (size, ranges) in enumerate(zip(target, part, strict=True)):
        if ranges is not None:
            shape.append(count(ranges))
        elif isinstance(size, int):
            shape.append(size)
        elif axis >= behind and source[axis - behind] == size:
            shape.append(1)  # as long as it is
        else:
            return None
    if given is not None and len(given) < len(target):
        shape = shape[len(target) - len(given) :]
    return Needs(
        (broadcast(part, target, source), *unchanged(node, facts)[1:]), constants={1: np.array(shape, np.int64)}
    )


def _tile(node: Node, parts: Parts, facts: Facts) -> Needs | None:
    part, source, repeats = first(parts), input_shape(node, 0, facts), facts.constant(node.inputs[1])
    if source is None or repeats is None:
        return None
    needed, times = list(part), [int(count_) for count_ in repeats]
    for axis, ranges in enumerate(part):
        if ranges is not None and times[axis] != 1:
            if source[axis] != 1:
                return None
            needed[axis], times[axis] = None, count(ranges)
    return Needs((tuple(needed), *unchanged(node, facts)[1:]), constants={1: np.array(times, np.int64)})


def _concat(node: Node, parts: Parts, facts: Facts) -> Needs | None:
    part = first(parts)
    axis = node.attributes.get_int("axis") % len(part)
    start = 0
    needed: list[Part | None] = []
    for place in range(len(node.inputs)):
        shape = input_shape(node, place, facts)
        size = None if shape is None else shape[axis]
        if not isinstance(size, int):
            return Needs((part,) * len(node.inputs)) if part[axis] is None else None
        ranges = clipped(part[axis], start, start + size)
        start += size
        needed.append(None if ranges == () else (*part[:axis], ranges, *part[axis + 1 :]))
    return Needs(tuple(needed))


def _split(node: Node, parts: Parts, facts: Facts) -> Needs | None:
    source = input_shape(node, 0, facts)
    if source is None:
        return None
    axis = node.attributes.get_int("axis", 0) % len(source)
    start = 0
    selected: list[Part | None] = []
    for place, part in enumerate(parts):
        shape = output_shape(node, facts, place)
        size = None if shape is None else shape[axis]
        if not isinstance(size, int):
            return None
        if part is None:
            selected.append(None)
        else:
            ranges = tuple(shifted(part[axis], start, size))
            selected.append((*part[:axis], ranges if ranges != ((0, source[axis]),) else None, *part[axis + 1 :]))
        start += size
    needed: Part | None = None
    for chosen in selected:
        if chosen is not None:
            needed = chosen if needed is None else union(needed, chosen, source)
    return Needs((needed, *unchanged(node, facts)[1:]), selects=tuple(selected))


def _slice(node: Node, parts: Parts, facts: Facts) -> Needs | None:
    part, source = first(parts), input_shape(node, 0, facts)
    bounds = [facts.constant(value) for value in node.inputs[1:]]
    if source is None or any(
        value is not None and known is None for value, known in zip(node.inputs[1:], bounds, strict=True)
    ):
        return None
    starts, ends = ([int(entry) for entry in bound] if bound is not None else [] for bound in bounds[:2])
    given_axes = bounds[2] if len(bounds) > 2 else None
    given_steps = bounds[3] if len(bounds) > 3 else None
    axes = list(range(len(starts))) if given_axes is None else [int(axis) % len(source) for axis in given_axes]
    steps = [1] * len(starts) if given_steps is None else [int(step) for step in given_steps]
    needed = list(part)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        size = source[axis]
        if not isinstance(size, int) or step < 1:
            return None
        entries = np.arange(size)[start:end:step]
        chosen = entries if part[axis] is None else entries[indices(part[axis] or ())]
        needed[axis] = from_indices((int(entry) for entry in chosen), size)
    selected = tuple(needed)
    return Needs((selected, *unchanged(node, facts)[1:]), selects=(selected,))


def _gather(node: Node, parts: Parts, facts: Facts) -> Needs | None:
    part, source, places = first(parts), input_shape(node, 0, facts), input_shape(node, 1, facts)
    if source is None or places is None:
        return None
    axis = node.attributes.get_int("axis", 0) % len(source)
    of_indices = part[axis : axis + len(places)]
    before, behind = part[:axis], part[axis + len(places) :]
    constant, size = facts.constant(node.inputs[1]), source[axis]
    if constant is None or not isinstance(size, int):
        return Needs(((*before, None, *behind), of_indices))
    if not only_whole(of_indices, range(len(places))):
        if len(places) != 1 or of_indices[0] is None:
            return None
        constant = constant[indices(of_indices[0])]
    wanted = from_indices((int(entry) for entry in np.unique(constant % size)), size)
    if wanted is not None:
        entries = indices(wanted)
        constant = np.searchsorted(entries, constant % size)
    changed = np.array(constant, dtype=np.int64).reshape(np.shape(constant))
    return Needs(((*before, wanted, *behind), of_indices), constants={1: changed})


RULES: Mapping[tuple[str, str], Rule] = {
    ("", "Concat"): _concat,
    ("", "Expand"): _expand,
    ("", "Flatten"): _reshape,
    ("", "Gather"): _gather,
    ("", "Reshape"): _reshape,
    ("", "Slice"): _slice,
    ("", "Split"): _split,
    ("", "Squeeze"): _reshape,
    ("", "Tile"): _tile,
    ("", "Transpose"): _transpose,
    ("", "Unsqueeze"): _reshape,
}

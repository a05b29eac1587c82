"""Parts of tensors: which entries of each axis a rank has, as ranges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from inferencex.formats.graph import Dimension

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Entries of an axis: ascending ranges `[start, stop)` that do not touch."""

Part: TypeAlias = tuple[Ranges | None, ...]
"""Entries of a tensor, axis by axis: those whose every index is in the ranges of its axis; None is the whole axis.

An axis whose size is known only in a step, such as that of tokens, is always whole.
"""

Shape: TypeAlias = tuple[Dimension, ...]


def whole(rank: int) -> Part:
    """Return all of a tensor with so many axes."""
    return (None,) * rank


def is_whole(part: Part) -> bool:
    """Tell whether a part is everything."""
    return all(ranges is None for ranges in part)


def count(ranges: Ranges) -> int:
    """Return how many entries ranges hold."""
    return sum(stop - start for start, stop in ranges)


def size_of(dimension: Dimension, ranges: Ranges | None) -> Dimension:
    """Return the size of an axis in the part."""
    return dimension if ranges is None else count(ranges)


def shape_of(shape: Shape, part: Part) -> Shape:
    """Return the shape of the part of a tensor."""
    return tuple(size_of(dimension, ranges) for dimension, ranges in zip(shape, part, strict=True))


def normalized(ranges: Iterable[tuple[int, int]], size: Dimension) -> Ranges | None:
    """Return ranges in order with neighbours joined; None where they are the whole axis."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(entry for entry in ranges if entry[0] < entry[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return None if joined == [(0, size)] else tuple(joined)


def union(left: Part, right: Part, shape: Shape) -> Part:
    """Return the least part that holds both, axis by axis."""
    return tuple(
        None if one is None or other is None else normalized((*one, *other), size)
        for one, other, size in zip(left, right, shape, strict=True)
    )


def clipped(ranges: Ranges | None, start: int, stop: int) -> Ranges | None:
    """Return what ranges have of the entries `[start, stop)`, counted from `start`."""
    if ranges is None:
        return None
    inside = ((max(first, start) - start, min(last, stop) - start) for first, last in ranges)
    return normalized(inside, stop - start)


def shifted(ranges: Ranges | None, offset: int, size: int) -> list[tuple[int, int]]:
    """Return the ranges of an axis of `size` as a list, moved by `offset`."""
    return [(first + offset, last + offset) for first, last in (((0, size),) if ranges is None else ranges)]


def scaled(ranges: Ranges | None, factor: int) -> Ranges | None:
    """Return the ranges that stand for each entry repeated or divided into `factor` neighbours."""
    return None if ranges is None else tuple((first * factor, last * factor) for first, last in ranges)


def in_units(ranges: Ranges | None, unit: int, size: int) -> Ranges | str | None:
    """Return which units of `unit` entries the ranges are made of, the last of which may be short.

    Returns a text that says what is wrong where ranges begin or end inside of a unit.
    """
    if ranges is None:
        return None
    for first, last in ranges:
        if first % unit or (last % unit and last != size):
            return f"entries {first} to {last} of {size} begin or end inside of a group of {unit}"
    units = -(-size // unit)
    return normalized(((first // unit, -(-last // unit)) for first, last in ranges), units)


def indices(ranges: Ranges) -> NDArray[np.int64]:
    """Return the entries that ranges hold, ascending."""
    return np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in ranges] or [np.zeros(0, np.int64)])


def from_indices(entries: Iterable[int], size: int) -> Ranges | None:
    """Return the ranges that hold the entries of an axis of `size`."""
    return normalized(((entry, entry + 1) for entry in entries), size)


def positions(inner: Ranges, outer: Ranges | None) -> Ranges:
    """Return where the entries of `inner` are among those of `outer`, which has them all."""
    if outer is None:
        return inner
    found: list[tuple[int, int]] = []
    before = 0
    for start, stop in outer:
        found += [
            (max(first, start) - start + before, min(last, stop) - start + before)
            for first, last in inner
            if first < stop and last > start
        ]
        before += stop - start
    joined = normalized(found, None)
    assert joined is not None
    return joined


def reshaped(part: Part, shape: Shape, target: Shape) -> Part | None:
    """Return the same entries of a tensor of another shape; None where ranges of its axes cannot say which they are.

    Axes of a size that only a step knows are the same on both sides, in the same order.
    """
    if is_whole(part):
        return whole(len(target))
    known, wanted = _fixed(shape), _fixed(target)
    if [size for size in shape if not isinstance(size, int)] != [size for size in target if not isinstance(size, int)]:
        return None
    if np.prod(known, dtype=np.int64) != np.prod(wanted, dtype=np.int64):
        return None
    mask = np.ones(known, dtype=bool)
    for axis, ranges in enumerate(part):
        if ranges is not None:
            chosen = np.zeros(known[axis], dtype=bool)
            chosen[indices(ranges)] = True
            mask &= chosen.reshape([-1 if i == axis else 1 for i in range(len(known))])
    mask = mask.reshape(wanted)
    result: list[Ranges | None] = []
    held = 1
    for axis, size in enumerate(wanted):
        entries = np.flatnonzero(mask.any(axis=tuple(i for i in range(len(wanted)) if i != axis)))
        held *= len(entries)
        result.append(from_indices((int(entry) for entry in entries), size))
    return tuple(result) if held == int(mask.sum()) else None


def _fixed(shape: Shape) -> list[int]:
    return [size if isinstance(size, int) else 1 for size in shape]


def even_cuts(size: int, parts: int) -> Sequence[Ranges]:
    """Return `parts` ranges of neighbours, whose sizes differ by one at most."""
    borders = [size * i // parts for i in range(parts + 1)]
    return [((start, stop),) if start < stop else () for start, stop in pairwise(borders)]

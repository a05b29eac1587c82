"""The part of a stored tensor that a rank has, read from the file without the rest where its bytes lie apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferencex.formats.dtypes import DataType
from inferencex.formats.packing import pack_bits, unpack_bits
from inferencex.runtime.parallel.parts import Part, Ranges, count, is_whole

Array = NDArray[Any]


@dataclass(frozen=True)
class TensorCut:
    """A part of a stored tensor.

    source: the tensor's name in the bundle
    dtype:  its type in the graph
    shape:  of the whole tensor, element by element, however they are packed
    bits:   of an element; less than 8 where several share a byte
    part:   the entries that are wanted
    """

    source: str
    dtype: DataType
    shape: tuple[int, ...]
    bits: int
    part: Part

    @property
    def cut_shape(self) -> tuple[int, ...]:
        """The shape of the part, element by element."""
        return tuple(
            size if ranges is None else count(ranges) for size, ranges in zip(self.shape, self.part, strict=True)
        )

    @property
    def nbytes(self) -> int:
        """Bytes that the part takes once stored."""
        return (math.prod(self.cut_shape) * self.bits + 7) // 8


def cut_tensor(stored: Array, cut: TensorCut) -> Array:
    """Return the part of a tensor in the same storage type; a view of `stored` where that can be."""
    if is_whole(cut.part):
        return stored
    if cut.bits >= 8:
        return _pick(stored.reshape(cut.shape), cut.part)
    row = cut.shape[-1] * cut.bits
    last = cut.part[-1]
    borders = [entry * cut.bits for entries in (last or ()) for entry in entries]
    if row % 8 or any(border % 8 for border in borders):
        return _repacked(stored, cut)
    rows_of_bytes = stored.reshape(*cut.shape[:-1], row // 8)
    of_bytes = None if last is None else tuple((a * cut.bits // 8, b * cut.bits // 8) for a, b in last)
    return _pick(rows_of_bytes, (*cut.part[:-1], of_bytes)).reshape(-1)


def _pick(array: Array, part: Sequence[Ranges | None]) -> Array:
    """Return the entries of a part: axis by axis, first those that are one range, for that copies nothing."""
    for axis, ranges in enumerate(part):
        if ranges is not None and len(ranges) == 1:
            array = array[(slice(None),) * axis + (slice(*ranges[0]),)]
    for axis, ranges in enumerate(part):
        if ranges is not None and len(ranges) != 1:
            pieces = [array[(slice(None),) * axis + (slice(start, stop),)] for start, stop in ranges]
            array = np.concatenate(pieces, axis=axis) if pieces else array[(slice(None),) * axis + (slice(0, 0),)]
    return array


def _repacked(stored: Array, cut: TensorCut) -> Array:
    """Unpack, take, and pack again, where elements of a row begin or end inside of a byte."""
    values = unpack_bits(stored.reshape(-1).view(np.uint8), cut.bits, cut.shape)
    return pack_bits(np.ascontiguousarray(_pick(values, cut.part)), cut.bits)

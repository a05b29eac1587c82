"""Values of a program: where their elements lie, as strided views of storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferencex.formats.records import record
from inferencex.runtime.backends.cpu.lowering.extents import ONE, Extent
from inferencex.runtime.backends.graph.static_values import StoredWeight

ITEM_SIZES = {"f32": 4, "f16": 2, "bf16": 2, "f8e4m3": 1, "i64": 8, "i32": 4, "i8": 1, "u8": 1, "bool": 1}

MAX_RANK = 6
"""Of an operand of the native module."""


@record(eq=False)
class Storage:
    """Memory of a program.

    nbytes:  its size
    array:   what it holds where that never changes; None: a part of the arena, or layer state
    layer:   the attention layer whose state it is, else None
    """

    nbytes: Extent
    array: NDArray[Any] | None = field(default=None, repr=False)
    layer: int | None = None

    @property
    def is_arena(self) -> bool:
        """Tell whether the memory plan gives it a place."""
        return self.array is None and self.layer is None


@record(frozen=True)
class View:
    """Elements of a storage: `strides` and `offset` count elements; a broadcast dimension has stride 0."""

    storage: Storage
    dtype: str
    dims: tuple[Extent, ...]
    strides: tuple[Extent, ...]
    offset: int = 0

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.dims)

    @property
    def is_contiguous(self) -> bool:
        """Tell whether the elements follow each other in row-major order."""
        return self.strides == contiguous_strides(self.dims)

    def reshaped(self, dims: Sequence[Extent]) -> View | None:
        """Return a view of other dimensions and as many elements, or None where that takes a copy."""
        strides = _reshaped_strides(self.dims, self.strides, tuple(dims))
        return None if strides is None else View(self.storage, self.dtype, tuple(dims), strides, self.offset)

    def transposed(self, order: Sequence[int]) -> View:
        """Return the view with its dimensions in another order."""
        return self._with(tuple([self.dims[i] for i in order]), tuple([self.strides[i] for i in order]))

    def sliced(self, axis: int, start: int, size: Extent) -> View | None:
        """Return `size` entries of `axis` from `start` on; None where their place depends on the step."""
        stride = self.strides[axis]
        if start and not stride.is_constant:
            return None
        dims = (*self.dims[:axis], size, *self.dims[axis + 1 :])
        return View(self.storage, self.dtype, dims, self.strides, self.offset + start * stride.coefficient)

    def every(self, axis: int, step: int) -> View:
        """Return every `step`-th entry of an axis of constant size, beginning with the first."""
        dims, strides = list(self.dims), list(self.strides)
        dims[axis] = Extent(-(-dims[axis].coefficient // step))
        strides[axis] = strides[axis] * Extent(step)
        return self._with(tuple(dims), tuple(strides))

    def broadcast_to(self, dims: Sequence[Extent]) -> View:
        """Return the view repeated along new leading dimensions and along those of size 1 (numpy's rules)."""
        missing = len(dims) - self.rank
        strides = [Extent(0)] * missing
        for own, stride, wanted in zip(self.dims, self.strides, dims[missing:], strict=True):
            if own != wanted and own != ONE:
                raise ValueError(f"{[str(d) for d in self.dims]} does not broadcast to {[str(d) for d in dims]}")
            strides.append(stride if own == wanted else Extent(0))
        return self._with(tuple(dims), tuple(strides))

    def _with(self, dims: tuple[Extent, ...], strides: tuple[Extent, ...]) -> View:
        return View(self.storage, self.dtype, dims, strides, self.offset)


@lru_cache(maxsize=1024)  # a graph has few shapes, many times
def contiguous_strides(dims: tuple[Extent, ...]) -> tuple[Extent, ...]:
    """Return the strides of a row-major array; a dimension of size 1 has the stride it would have otherwise."""
    strides = [ONE]
    for size in reversed(dims[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides[: len(dims)]))


def constant_view(array: NDArray[Any], dtype: str) -> View:
    """Return a view of a whole array that never changes."""
    data = np.ascontiguousarray(array)
    dims = _constant_dims(data.shape)
    return View(Storage(Extent(data.nbytes), data), dtype, dims, contiguous_strides(dims))


@lru_cache(maxsize=1024)
def _constant_dims(shape: tuple[int, ...]) -> tuple[Extent, ...]:
    return tuple([Extent(size) for size in shape])


def weight_views(weight: StoredWeight) -> tuple[View, View | None, View | None]:
    """Return views of a stored weight's elements, scales and zero points."""
    scales, zero_points = (
        None if part is None else constant_view(part.array, part.dtype) for part in (weight.scales, weight.zero_points)
    )
    return constant_view(weight.values.array, weight.values.dtype), scales, zero_points


def broadcast_dims(shapes: Sequence[Sequence[Extent]]) -> tuple[Extent, ...]:
    """Return the dimensions that shapes broadcast to. Raises ValueError when they do not."""
    rank = max(len(shape) for shape in shapes)
    result = []
    for place in range(-rank, 0):
        sizes = {shape[place] for shape in shapes if len(shape) >= -place} - {ONE}
        if len(sizes) > 1:
            raise ValueError(f"shapes {[[str(d) for d in shape] for shape in shapes]} do not broadcast")
        result.append(sizes.pop() if sizes else ONE)
    return tuple(result)


@lru_cache(maxsize=1024)
def _reshaped_strides(
    dims: tuple[Extent, ...], strides: tuple[Extent, ...], wanted: tuple[Extent, ...]
) -> tuple[Extent, ...] | None:
    """Split and merge dimensions whose elements lie evenly, as numpy's reshape without a copy does."""
    old = [(size, stride) for size, stride in zip(dims, strides, strict=True) if size != ONE]
    new_strides: list[Extent] = [ONE] * len(wanted)
    places = [i for i, size in enumerate(wanted) if size != ONE]
    o = n = 0
    while o < len(old) or n < len(places):
        if o == len(old) or n == len(places):
            return None
        old_end, new_end = o + 1, n + 1
        old_size, new_size = old[o][0], wanted[places[n]]
        while old_size != new_size:
            larger_old = old_size.divided_by(new_size) is not None
            if larger_old and new_end < len(places):
                new_size = new_size * wanted[places[new_end]]
                new_end += 1
            elif old_end < len(old):
                old_size = old_size * old[old_end][0]
                old_end += 1
            elif new_end < len(places):
                new_size = new_size * wanted[places[new_end]]
                new_end += 1
            else:
                return None
        for i in range(o, old_end - 1):
            if old[i][1] != old[i + 1][1] * old[i + 1][0]:
                return None
        stride = old[old_end - 1][1]
        for place in reversed(places[n:new_end]):
            new_strides[place] = stride
            stride = stride * wanted[place]
        o, n = old_end, new_end
    # Dimensions of size 1 get the stride of what follows them, so that contiguous stays contiguous.
    following = ONE
    for i in range(len(wanted) - 1, -1, -1):
        if wanted[i] == ONE:
            new_strides[i] = following
        following = new_strides[i] * wanted[i]
    return tuple(new_strides)

"""Put quantized tensors together without changing what any of their numbers stands for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferencex.formats.packing import PER_CHANNEL, QuantizedTensor, group_count, pack_bits


def rows_of(tensor: QuantizedTensor, start: int, stop: int) -> QuantizedTensor:
    """Return rows `start:stop` of a matrix."""
    if (start, stop) == (0, tensor.shape[0]):
        return tensor
    values = _values(tensor)[start:stop]
    zero_points = tensor.zero_point_integers()
    return _build(
        tensor,
        (stop - start, *tensor.shape[1:]),
        _stored(tensor, values),
        tensor.scales[start:stop],
        None if zero_points is None else _stored(tensor, zero_points[start:stop]),
        tensor.group_size,
    )


def concatenate_rows(tensors: Sequence[QuantizedTensor]) -> QuantizedTensor | None:
    """Return matrices one below the other as one tensor, or None where one tensor cannot hold them.

    What differs is written in the form that holds both: scales as float32, groups as the smallest, zero points that
    are in the middle as numbers, integers of three and four bits as integers of eight.
    """
    return _joined(tensors, lambda parts: np.concatenate(parts, axis=0), (sum(t.shape[0] for t in tensors),))


def stack(tensors: Sequence[QuantizedTensor]) -> QuantizedTensor | None:
    """Return `E` matrices `[N, K]` as one tensor `[E, N, K]`, or None where one tensor cannot hold them."""
    if len({tensor.shape for tensor in tensors}) != 1:
        return None
    grouped = [_regrouped(t, t.shape[1]) if t.group_size == PER_CHANNEL else t for t in tensors]
    return _joined(grouped, np.stack, (len(tensors), tensors[0].shape[0]))


def _joined(tensors: Sequence[QuantizedTensor], join: Any, leading: tuple[int, ...]) -> QuantizedTensor | None:
    columns = {tensor.shape[-1] for tensor in tensors}
    if len({tensor.number for tensor in tensors}) != 1 or len(columns) != 1:
        return None
    factors = {None if tensor.tensor_scale is None else float(tensor.tensor_scale) for tensor in tensors}
    if len(factors) != 1:
        return None
    group_size = _common_group(tensors)
    if group_size is None:
        return None
    parts = [_regrouped(tensor, group_size) for tensor in tensors]
    if tensors[0].number == "int":
        parts = _alike(parts)
    if len({tensor.scales.dtype for tensor in parts}) != 1:
        if parts[0].number == "e2m1":
            return None
        parts = [_with_wide_scales(tensor) for tensor in parts]
    first = parts[0]
    shape = (*leading, *columns)
    whole_bytes = all(math.prod(tensor.shape) * tensor.bits % 8 == 0 for tensor in parts)
    if first.bits < 8 and whole_bytes:
        values: NDArray[Any] = np.concatenate([tensor.values for tensor in parts])
    else:
        values = _stored(first, join([_values(tensor) for tensor in parts]))
    zero_points = None
    if not first.symmetric:
        zero_points = _stored(first, join([tensor.zero_point_integers() for tensor in parts]))
    scales = join([tensor.scales for tensor in parts])
    return _build(first, shape, values, scales, zero_points, group_size)


def _common_group(tensors: Sequence[QuantizedTensor]) -> int | None:
    """Return a group size that every tensor can be written in; None when there is none."""
    sizes = {tensor.group_size for tensor in tensors}
    if len(sizes) == 1:
        return sizes.pop()
    smallest = min(size for size in sizes if size != PER_CHANNEL)
    columns = tensors[0].shape[-1]
    fits = all(size == PER_CHANNEL or size >= columns or size % smallest == 0 for size in sizes)
    return smallest if fits else None


def _regrouped(tensor: QuantizedTensor, group_size: int) -> QuantizedTensor:
    """Write a tensor in groups that are parts of its own, each with the scale of the whole."""
    if tensor.group_size == group_size:
        return tensor
    columns = tensor.shape[-1]
    own = columns if tensor.group_size == PER_CHANNEL else tensor.group_size
    source = np.arange(group_count(columns, group_size)) * group_size // own

    def spread(values: NDArray[Any]) -> NDArray[Any]:
        return np.ascontiguousarray((values[:, None] if tensor.group_size == PER_CHANNEL else values)[..., source])

    zero_points = tensor.zero_point_integers()
    kept = None if zero_points is None else _stored(tensor, spread(zero_points))
    return _build(tensor, tensor.shape, tensor.values, spread(tensor.scales), kept, group_size)


def _alike(tensors: Sequence[QuantizedTensor]) -> list[QuantizedTensor]:
    """Give tensors of integers the same bits and symmetry."""
    if len({(tensor.bits, tensor.symmetric) for tensor in tensors}) == 1:
        return list(tensors)
    widths = {tensor.bits for tensor in tensors}
    bits = widths.pop() if len(widths) == 1 else 4 if widths == {3, 4} else 8
    symmetric = all(tensor.symmetric for tensor in tensors)
    return [_recoded(tensor, bits, symmetric) for tensor in tensors]


def _recoded(tensor: QuantizedTensor, bits: int, symmetric: bool) -> QuantizedTensor:
    """Write the same integers in more bits, or with zero points."""
    # Signed and unsigned integers differ by half the range, and so do their zero points.
    is_unsigned = not tensor.symmetric and tensor.bits < 8
    to_signed = (1 << (tensor.bits - 1)) if is_unsigned else 0
    from_signed = 0 if symmetric or bits == 8 else 1 << (bits - 1)

    def recode(integers: NDArray[Any]) -> NDArray[Any]:
        shifted = (integers.astype(np.int16) - to_signed + from_signed).astype(np.int8)
        return shifted if bits == 8 else pack_bits(shifted, bits)

    zero_points = tensor.zero_point_integers()
    if zero_points is None:
        zero_points = np.zeros(tensor.scale_shape, dtype=np.int8)
    return QuantizedTensor(
        values=recode(tensor.integers()),
        scales=tensor.scales,
        zero_points=None if symmetric else recode(zero_points),
        bits=bits,
        group_size=tensor.group_size,
        symmetric=symmetric,
        shape=tensor.shape,
    )


def _with_wide_scales(tensor: QuantizedTensor) -> QuantizedTensor:
    return _build(
        tensor, tensor.shape, tensor.values, tensor.scales.astype(np.float32), tensor.zero_points, tensor.group_size
    )


def _values(tensor: QuantizedTensor) -> NDArray[Any]:
    """Return the numbers one by one in the tensor's shape, those of floats as they are coded."""
    return tensor.values if tensor.bits == 8 else tensor.integers()


def _stored(like: QuantizedTensor, values: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(values) if like.bits == 8 else pack_bits(np.ascontiguousarray(values), like.bits)


def _build(
    like: QuantizedTensor,
    shape: tuple[int, ...],
    values: NDArray[Any],
    scales: NDArray[Any],
    zero_points: NDArray[Any] | None,
    group_size: int,
) -> QuantizedTensor:
    return QuantizedTensor(
        values=values,
        scales=np.ascontiguousarray(scales),
        zero_points=zero_points,
        bits=like.bits,
        group_size=group_size,
        symmetric=like.symmetric,
        shape=shape,
        number=like.number,
        tensor_scale=like.tensor_scale,
    )

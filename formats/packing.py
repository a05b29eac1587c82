"""Packed integer weights: the nibble layout of ONNX, and a quantized tensor with its scales and zero points."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferencex.formats.dtypes import DataType
from inferencex.formats.errors import QuantizationError

IntegerArray = NDArray[np.int8] | NDArray[np.uint8]

PER_CHANNEL = -1
"""The group size that means: one scale for each output channel."""


def pack_int4(values: IntegerArray) -> NDArray[np.uint8]:
    """Pack integers of four bits, two to a byte, first element in the low nibble, flat over the row-major tensor.

    `values` is int8 in -8..7 or uint8 in 0..15, of any shape; the result is uint8 `[ceil(size / 2)]`. An odd count
    leaves the last high nibble 0 (ONNX, "Int4 packing").
    """
    flat = values.reshape(-1).view(np.uint8) & np.uint8(0x0F)
    packed = flat[0::2].copy()
    packed[: flat.size // 2] |= flat[1::2] << np.uint8(4)
    return packed


def unpack_int4(packed: NDArray[np.uint8], shape: tuple[int, ...], *, signed: bool) -> IntegerArray:
    """Undo `pack_int4`: return int8 (`signed`) or uint8 integers of `shape`.

    Raises QuantizationError when `packed` does not hold exactly the bytes that `shape` needs.
    """
    count = math.prod(shape)
    if packed.dtype != np.uint8 or packed.size != (count + 1) // 2:
        raise QuantizationError(
            f"{packed.size} bytes of {packed.dtype} cannot hold packed 4-bit integers of shape {list(shape)}: "
            f"expected {(count + 1) // 2} bytes of uint8"
        )
    flat = np.empty(packed.size * 2, dtype=np.uint8)
    flat[0::2] = packed.reshape(-1) & np.uint8(0x0F)
    flat[1::2] = packed.reshape(-1) >> np.uint8(4)
    values = flat[:count].reshape(shape)
    if not signed:
        return values
    # Moving the nibble's sign bit to the byte's, then shifting back as a signed number, extends the sign.
    return (values << np.uint8(4)).view(np.int8) >> np.int8(4)


def group_count(channels: int, group_size: int) -> int:
    """Return the groups along `channels` input channels; the last one may be ragged."""
    return 1 if group_size == PER_CHANNEL else -(-channels // group_size)


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A weight `[..., N, K]` as integers in groups along K: `weight = (integer - zero_point) * scale`.

    values:       4 bits: uint8 `[ceil(size / 2)]`, see `pack_int4`; 8 bits: int8 of the tensor's shape
    scales:       float16 or float32 `[..., N, ceil(K / group_size)]`, or `[N]` per channel
    zero_points:  None when symmetric; else stored like `values`, in the shape of `scales`
    bits:         4 or 8; asymmetric 4-bit integers are unsigned (0..15), all others signed
    group_size:   input channels that share a scale; `PER_CHANNEL` for one scale a row (matrices only)
    shape:        the logical shape `[..., N, K]`
    """

    values: IntegerArray
    scales: NDArray[np.float16] | NDArray[np.float32]
    zero_points: IntegerArray | None
    bits: int
    group_size: int
    symmetric: bool
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check that the parts belong together; raises QuantizationError."""
        if self.bits not in (4, 8):
            raise QuantizationError(f"quantized tensors have 4 or 8 bits, not {self.bits}")
        if len(self.shape) < 2 or (self.group_size == PER_CHANNEL and len(self.shape) != 2):
            raise QuantizationError(f"shape {list(self.shape)} does not go with group size {self.group_size}")
        if self.group_size != PER_CHANNEL and self.group_size < 1:
            raise QuantizationError(f"group size {self.group_size} is neither positive nor {PER_CHANNEL} (per channel)")
        if self.symmetric != (self.zero_points is None):
            raise QuantizationError("zero points belong to asymmetric tensors, and only to them")
        if self.scales.dtype not in (np.float16, np.float32) or self.scales.shape != self.scale_shape:
            raise QuantizationError(
                f"scales are {self.scales.dtype} {list(self.scales.shape)}, "
                f"expected float16 or float32 {list(self.scale_shape)}"
            )
        self._check_integers("values", self.values, self.shape)
        if self.zero_points is not None:
            self._check_integers("zero points", self.zero_points, self.scale_shape)

    def _check_integers(self, what: str, array: IntegerArray, shape: tuple[int, ...]) -> None:
        expected_dtype = np.uint8 if self.bits == 4 else np.int8
        expected_shape = ((math.prod(shape) + 1) // 2,) if self.bits == 4 else shape
        if array.dtype != expected_dtype or array.shape != expected_shape:
            raise QuantizationError(
                f"{what} are {array.dtype} {list(array.shape)}, "
                f"expected {np.dtype(expected_dtype)} {list(expected_shape)}"
            )

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the scales, and of the zero points before packing."""
        if self.group_size == PER_CHANNEL:
            return self.shape[:-1]
        return (*self.shape[:-1], group_count(self.shape[-1], self.group_size))

    @property
    def dtype(self) -> DataType:
        """The IR's type of the integers: INT8, INT4, or UINT4 when asymmetric."""
        if self.bits == 8:
            return DataType.INT8
        return DataType.INT4 if self.symmetric else DataType.UINT4

    @property
    def scale_dtype(self) -> DataType:
        """The IR's type of the scales."""
        return DataType.FLOAT16 if self.scales.dtype == np.float16 else DataType.FLOAT

    @property
    def attributes(self) -> dict[str, int]:
        """`axis` and, in groups, `block_size` of the DequantizeLinear in front of this weight."""
        if self.group_size == PER_CHANNEL:
            return {"axis": 0}
        return {"axis": len(self.shape) - 1, "block_size": self.group_size}

    @property
    def nbytes(self) -> int:
        """Bytes stored: integers, scales and zero points."""
        zero_points = 0 if self.zero_points is None else self.zero_points.nbytes
        return self.values.nbytes + self.scales.nbytes + zero_points

    @property
    def bits_per_weight(self) -> float:
        """Stored bits divided by weights."""
        return self.nbytes * 8 / math.prod(self.shape)

    def integers(self) -> IntegerArray:
        """Return the integers, one to a byte, in the tensor's shape."""
        return self._unpacked(self.values, self.shape)

    def zero_point_integers(self) -> IntegerArray | None:
        """Return the zero points, one to a byte, in the shape of the scales; None when symmetric."""
        return None if self.zero_points is None else self._unpacked(self.zero_points, self.scale_shape)

    def _unpacked(self, array: IntegerArray, shape: tuple[int, ...]) -> IntegerArray:
        if self.bits == 8:
            return array
        return unpack_int4(array.view(np.uint8), shape, signed=self.symmetric)

    def dequantize(self) -> NDArray[np.float32]:
        """Return the weights, float32 in the tensor's shape, computed as ONNX's DequantizeLinear does."""
        scales = self._spread(self.scales.astype(np.float32))
        weights = self.integers().astype(np.float32)
        zero_points = self.zero_point_integers()
        if zero_points is not None:
            weights -= self._spread(zero_points.astype(np.float32))
        weights *= scales
        return weights

    def _spread(self, per_group: NDArray[Any]) -> NDArray[Any]:
        """Repeat a value of each group over the group's channels, cutting the last group where K ends."""
        if self.group_size == PER_CHANNEL:
            return per_group[:, None]
        return np.repeat(per_group, self.group_size, axis=-1)[..., : self.shape[-1]]

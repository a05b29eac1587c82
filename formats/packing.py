"""Packed weights: the bit layouts of small numbers, and a quantized tensor with its scales and zero points."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from inferencex.formats.dtypes import DataType
from inferencex.formats.errors import QuantizationError
from inferencex.formats.records import record

IntegerArray = NDArray[np.int8] | NDArray[np.uint8]

Number = Literal["int", "e4m3", "e2m1"]
"""What one value of a weight is: an integer, or a float of 8 or 4 bits (OCP, "Microscaling Formats", section 5.3)."""

NUMBER_BITS: dict[Number, tuple[int, ...]] = {"int": (3, 4, 5, 6, 8), "e4m3": (8,), "e2m1": (4,)}
"""Bits that a number may have."""

_BIT_STREAMS = (3, 5, 6)  # for which ONNX has no type

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


def pack_bits(values: IntegerArray, bits: int) -> NDArray[np.uint8]:
    """Pack integers of 1 to 8 bits into a stream of bits, flat over the row-major tensor, without any gap.

    Bit `b` of element `i` is bit `i * bits + b` of the stream, whose bit `n` is bit `n % 8` of byte `n // 8`. Of each
    element the low `bits` count; the result is uint8 `[ceil(size * bits / 8)]`, unused bits 0. Four bits give the
    layout of `pack_int4`.
    """
    flat = values.reshape(-1).view(np.uint8)
    words = -(-flat.size // 8)  # of eight elements, which take `bits` bytes
    padded = np.zeros(words * 8, dtype=np.uint8)
    np.bitwise_and(flat, np.uint8((1 << bits) - 1), out=padded[: flat.size])
    stream = np.zeros(words, dtype="<u8")
    for place in range(8):
        stream |= padded[place::8].astype("<u8") << np.uint64(place * bits)
    packed = stream.view(np.uint8).reshape(words, 8)[:, :bits].reshape(-1)
    return packed[: (flat.size * bits + 7) // 8].copy()


def unpack_bits(packed: NDArray[np.uint8], bits: int, shape: tuple[int, ...], *, signed: bool = False) -> IntegerArray:
    """Undo `pack_bits`: return uint8, or int8 integers in two's complement of `bits` bits when `signed`.

    Raises QuantizationError when `packed` does not hold exactly the bytes that `shape` needs.
    """
    count = math.prod(shape)
    expected = (count * bits + 7) // 8
    if packed.dtype != np.uint8 or packed.size != expected:
        raise QuantizationError(
            f"{packed.size} bytes of {packed.dtype} cannot hold packed {bits}-bit integers of shape {list(shape)}: "
            f"expected {expected} bytes of uint8"
        )
    words = -(-count // 8)
    bytes_of_words = np.zeros((words, 8), dtype=np.uint8)
    whole = packed.size // bits
    bytes_of_words[:whole, :bits] = packed.reshape(-1)[: whole * bits].reshape(whole, bits)
    if whole < words:
        bytes_of_words[whole, : packed.size - whole * bits] = packed.reshape(-1)[whole * bits :]
    stream = bytes_of_words.view("<u8").reshape(-1)
    values = np.empty((words, 8), dtype=np.uint8)
    for place in range(8):
        values[:, place] = ((stream >> np.uint64(place * bits)) & np.uint64((1 << bits) - 1)).astype(np.uint8)
    flat = values.reshape(-1)[:count].reshape(shape)
    if not signed:
        return flat
    shift = np.uint8(8 - bits)
    return (flat << shift).view(np.int8) >> np.int8(8 - bits)


def group_count(channels: int, group_size: int) -> int:
    """Return the groups along `channels` input channels; the last one may be ragged."""
    return 1 if group_size == PER_CHANNEL else -(-channels // group_size)


@cache
def _name_of(dtype: np.dtype[Any]) -> str:
    return dtype.name  # which numpy puts together anew whenever it is asked


_SCALE_TYPES: dict[Number, tuple[str, ...]] = {
    "int": ("float16", "float32"),
    "e4m3": ("float16", "float32"),
    "e2m1": ("float8_e4m3fn", "float8_e8m0fnu"),
}


@record(frozen=True, eq=False)
class QuantizedTensor:
    """A weight `[..., N, K]` as small numbers in groups along K: `weight = (value - zero_point) * scale`.

    values:       3, 5 and 6 bits: uint8 `[ceil(size * bits / 8)]`, see `pack_bits`; 4 bits: uint8 `[ceil(size / 2)]`,
                  see `pack_int4`, of integers or of the codes of float4_e2m1fn; 8 bits: int8 or float8_e4m3fn of the
                  tensor's shape
    scales:       `[..., N, ceil(K / group_size)]`, or `[N]` per channel: float16 or float32; of e2m1 numbers
                  float8_e4m3fn (times `tensor_scale`) or float8_e8m0fnu, powers of two
    zero_points:  None when symmetric; else stored like `values`, in the shape of `scales`; floats are symmetric
    bits:         3, 4, 5, 6 or 8; asymmetric integers of less than 8 bits are unsigned (0..7, 0..15), all others signed
    group_size:   input channels that share a scale; `PER_CHANNEL` for one scale a row (matrices only)
    shape:        the logical shape `[..., N, K]`
    number:       what a value is
    tensor_scale: float32 `[]`, a factor of all scales; there exactly when those are float8_e4m3fn
    """

    values: NDArray[Any]
    scales: NDArray[Any]
    zero_points: IntegerArray | None
    bits: int
    group_size: int
    symmetric: bool
    shape: tuple[int, ...]
    number: Number = "int"
    tensor_scale: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        """Check that the parts belong together; raises QuantizationError."""
        if self.bits not in NUMBER_BITS[self.number]:
            expected = " or ".join(map(str, NUMBER_BITS[self.number]))
            raise QuantizationError(f"quantized tensors of {self.number} numbers have {expected} bits, not {self.bits}")
        if len(self.shape) < 2 or (self.group_size == PER_CHANNEL and len(self.shape) != 2):
            raise QuantizationError(f"shape {list(self.shape)} does not go with group size {self.group_size}")
        if self.group_size != PER_CHANNEL and self.group_size < 1:
            raise QuantizationError(f"group size {self.group_size} is neither positive nor {PER_CHANNEL} (per channel)")
        if self.symmetric != (self.zero_points is None):
            raise QuantizationError("zero points belong to asymmetric tensors, and only to them")
        if self.number != "int" and not self.symmetric:
            raise QuantizationError(f"tensors of {self.number} numbers are symmetric; they have no zero points")
        kinds = _SCALE_TYPES[self.number]
        if _name_of(self.scales.dtype) not in kinds or self.scales.shape != self.scale_shape:
            raise QuantizationError(
                f"scales are {self.scales.dtype} {list(self.scales.shape)}, "
                f"expected {' or '.join(kinds)} {list(self.scale_shape)}"
            )
        self._check_tensor_scale()
        self._check_values("values", self.values, self.shape)
        if self.zero_points is not None:
            self._check_values("zero points", self.zero_points, self.scale_shape)

    def _check_tensor_scale(self) -> None:
        if (self.tensor_scale is not None) != (_name_of(self.scales.dtype) == "float8_e4m3fn"):
            raise QuantizationError("a tensor scale belongs to scales of float8_e4m3fn, and only to them")
        scale = self.tensor_scale
        if scale is not None and (scale.dtype != np.float32 or scale.shape != () or not 0 < float(scale) < math.inf):
            raise QuantizationError(
                f"the tensor scale is {scale.dtype} {list(scale.shape)}, expected one positive, finite float32"
            )

    def _check_values(self, what: str, array: NDArray[Any], shape: tuple[int, ...]) -> None:
        expected_dtype = np.dtype(np.uint8) if self.bits < 8 else self.dtype.numpy()
        expected_shape = ((math.prod(shape) * self.bits + 7) // 8,) if self.bits < 8 else shape
        if array.dtype != expected_dtype or array.shape != expected_shape:
            raise QuantizationError(
                f"{what} are {array.dtype} {list(array.shape)}, expected {expected_dtype} {list(expected_shape)}"
            )

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the scales, and of the zero points before packing."""
        if self.group_size == PER_CHANNEL:
            return self.shape[:-1]
        return (*self.shape[:-1], group_count(self.shape[-1], self.group_size))

    @property
    def dtype(self) -> DataType:
        """The IR's type of the stored values; UINT8 where the IR has none for them and they are a stream of bits."""
        if self.number != "int":
            return DataType.FLOAT8E4M3FN if self.number == "e4m3" else DataType.FLOAT4E2M1
        if self.bits == 8:
            return DataType.INT8
        if self.is_bit_stream:
            return DataType.UINT8
        return DataType.INT4 if self.symmetric else DataType.UINT4

    @property
    def is_bit_stream(self) -> bool:
        """Whether values and zero points are streams of bits to the IR, which `UnpackBits` expands."""
        return self.number == "int" and self.bits in _BIT_STREAMS

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the IR's shape of values or zero points whose logical shape is `shape`."""
        return ((math.prod(shape) * self.bits + 7) // 8,) if self.is_bit_stream else shape

    @property
    def scale_dtype(self) -> DataType:
        """The IR's type of the scales."""
        return _IR_SCALE_TYPES[self.scales.dtype.name]

    @property
    def attributes(self) -> dict[str, int]:
        """`axis` and, in groups, `block_size` of the DequantizeLinear in front of this weight."""
        if self.group_size == PER_CHANNEL:
            return {"axis": 0}
        return {"axis": len(self.shape) - 1, "block_size": self.group_size}

    @property
    def nbytes(self) -> int:
        """Bytes stored: values, scales and zero points."""
        zero_points = 0 if self.zero_points is None else self.zero_points.nbytes
        tensor_scale = 0 if self.tensor_scale is None else self.tensor_scale.nbytes
        return self.values.nbytes + self.scales.nbytes + zero_points + tensor_scale

    @property
    def bits_per_weight(self) -> float:
        """Stored bits divided by weights."""
        return self.nbytes * 8 / math.prod(self.shape)

    def integers(self) -> IntegerArray:
        """Return integer values, one to a byte, in the tensor's shape."""
        return self._unpacked(self.values, self.shape)

    def zero_point_integers(self) -> IntegerArray | None:
        """Return the zero points, one to a byte, in the shape of the scales; None when symmetric."""
        return None if self.zero_points is None else self._unpacked(self.zero_points, self.scale_shape)

    def _unpacked(self, array: NDArray[Any], shape: tuple[int, ...]) -> IntegerArray:
        if self.bits == 8:
            return array
        return unpack_bits(array.view(np.uint8), self.bits, shape, signed=self.symmetric and self.number == "int")

    def float_scales(self) -> NDArray[np.float32]:
        """Return what the scales stand for, the tensor's own included: float32, products rounded to it."""
        scales: NDArray[np.float32] = self.scales.astype(np.float32)
        return scales if self.tensor_scale is None else scales * self.tensor_scale

    def dequantize(self) -> NDArray[np.float32]:
        """Return the weights, float32 in the tensor's shape, computed as ONNX's DequantizeLinear does."""
        scales = self._spread(self.float_scales())
        if self.number == "e2m1":
            weights = self.integers().view(DataType.FLOAT4E2M1.numpy()).astype(np.float32)
        else:
            weights = (self.values if self.number == "e4m3" else self.integers()).astype(np.float32)
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


_IR_SCALE_TYPES: dict[str, DataType] = {
    "float16": DataType.FLOAT16,
    "float32": DataType.FLOAT,
    "float8_e4m3fn": DataType.FLOAT8E4M3FN,
    "float8_e8m0fnu": DataType.FLOAT8E8M0,
}

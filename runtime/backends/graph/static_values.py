"""What does not depend on the step: initializers, and what nodes compute from them alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferencex.formats.dialect.names import DOMAIN
from inferencex.formats.dtypes import DataType, is_packed
from inferencex.formats.errors import BackendError, BundleError, QuantizationError
from inferencex.formats.graph import Graph, Node, Value, to_array
from inferencex.formats.packing import unpack_bits, unpack_int4
from inferencex.formats.records import record
from inferencex.runtime.backends.graph.computed_tables import table_rows
from inferencex.runtime.backends.graph.well_formed import label_of

Array = NDArray[Any]

# element type -> (name in the native module, numpy type that its bits are read as)
NATIVE_TYPES: dict[DataType, tuple[str, type[np.generic]]] = {
    DataType.FLOAT: ("f32", np.float32),
    DataType.FLOAT16: ("f16", np.float16),
    DataType.BFLOAT16: ("bf16", np.uint16),
    DataType.FLOAT8E4M3FN: ("f8e4m3", np.uint8),
    DataType.INT64: ("i64", np.int64),
    DataType.INT32: ("i32", np.int32),
    DataType.INT8: ("i8", np.int8),
    DataType.UINT8: ("u8", np.uint8),
    DataType.INT4: ("u8", np.uint8),
    DataType.UINT4: ("u8", np.uint8),
    DataType.FLOAT4E2M1: ("u8", np.uint8),
    DataType.BOOL: ("bool", np.bool_),
}

_FLOAT_FORMATS = {DataType.FLOAT: "f32", DataType.BFLOAT16: "bf16", DataType.FLOAT16: "f16"}
_SCALED_FORMATS = {
    DataType.INT4: ("int4", True),
    DataType.UINT4: ("int4", False),
    DataType.INT8: ("int8", True),
    DataType.FLOAT8E4M3FN: ("f8e4m3", True),
    DataType.FLOAT4E2M1: ("f4e2m1", True),
}
_STREAM_FORMATS = {3: "int3", 5: "int5", 6: "int6"}
_ZERO_POINTS = ("int8", "int4", *_STREAM_FORMATS.values())
_INTEGER_FORMATS = (*_ZERO_POINTS, "f4e2m1")
_SMALLEST_HALF = 2.0**-12  # of scales that may be halved without leaving float16's normal range

PER_CHANNEL = -1

MOST_TABLE_ELEMENTS = 1 << 28
"""Of a table that the graph computes: 1 GB of float32."""


@record(frozen=True, eq=False)
class StoredArray:
    """The stored elements of a tensor, memory-mapped where they lie in a weight file.

    dtype:  what they are: f32, f16, bf16, f8e4m3, i64, i32, i8, u8 or bool
    array:  their bits; bf16 as uint16, f8e4m3 as uint8
    """

    dtype: str
    array: Array = field(repr=False)


@record(frozen=True, eq=False)
class StoredWeight:
    """A weight `[..., N, K]` as the bundle stores it.

    format:       f32, bf16, f16, f8e4m3, int3, int4, int5, int6, int8 or f4e2m1
    values:       its elements; of int4 and f4e2m1 uint8, two to a byte; of int3, int5 and int6 uint8, a stream of
                  bits
    scales:       [..., N, groups], or [N] per channel, float32 or float16; None for plain floats
    zero_points:  stored like the values; None when symmetric
    group:        features that share a scale, `PER_CHANNEL` for one scale a row
    is_signed:    whether integers of less than 8 bits are signed
    """

    format: str
    shape: tuple[int, ...]
    values: StoredArray
    scales: StoredArray | None = None
    zero_points: StoredArray | None = None
    group: int = PER_CHANNEL
    is_signed: bool = True

    @property
    def is_integer(self) -> bool:
        """Tell whether integer kernels can multiply it."""
        return self.format in _INTEGER_FORMATS

    @property
    def multiplied_bits(self) -> int:
        """Bits of the integers that integer kernels multiply it as: 4 for integers of up to 4, else 8."""
        return 4 if self.format in ("int4", "int3") else 8

    def for_integers(self) -> StoredWeight:
        """Return the weight as integer kernels want it: they take twice the values of 4-bit floats, all integers."""
        if self.format != "f4e2m1" or self.scales is None:
            return self
        halves = self.scales.array * self.scales.array.dtype.type(0.5)
        return replace(self, scales=StoredArray(self.scales.dtype, halves))


class StaticValues:
    """The static values of a graph, read or computed when asked for.

    `tensor(name)` returns a stored tensor as `Bundle.tensor` does.
    """

    def __init__(self, graph: Graph, tensor: Callable[[str], Array]) -> None:
        self._tensor = tensor
        self._static = {name for name in graph.initializers}
        self._arrays: dict[str, Array] = {}
        self._tables: dict[tuple[str, int], Array] = {}
        self._weights: dict[str, StoredWeight | None] = {}
        for node in graph:
            for value in node.inputs:
                if value is not None and value.name not in self._static:
                    break
            else:
                self._static.update([value.name for value in node.outputs])

    def __contains__(self, value: Value | None) -> bool:
        return value is not None and value.name in self._static

    def holds_any(self, values: Sequence[Value]) -> bool:
        """Tell whether one of the values is static."""
        return not self._static.isdisjoint([value.name for value in values])

    def array(self, value: Value) -> Array:
        """Return the elements of a static value; those in no file are kept. 4-bit integers come as int8 or uint8."""
        found = self._arrays.get(value.name)
        if found is not None:
            return found
        producer = value.producer()
        if producer is None:
            array = self._elements(value)
            if value.constant is not None:
                self._arrays[value.name] = array  # all layers ask for the same few
            return array
        for output, result in zip(producer.outputs, self._evaluate(producer), strict=False):
            self._arrays[output.name] = result
        return self._arrays[value.name]

    def rows(self, value: Value, count: int) -> Array | None:
        """Return the first `count` rows of a float32 matrix that can be computed without the others, else None.

        Raises BackendError when it has another shape than the graph says, or is larger than any table.
        """
        if value.producer() is None or (value.name, count) in self._tables:
            return self._tables.get((value.name, count))
        rows, *width = self._shape(value)
        expected = (min(count, rows), *width)
        if math.prod(expected) > MOST_TABLE_ELEMENTS:
            raise BackendError(
                f"{value.name!r} would have {list(expected)} elements; the limit is {MOST_TABLE_ELEMENTS}"
            )
        found = table_rows(value, expected[0], self.array)
        if found is None or found.dtype != np.float32:
            return None
        if found.shape != expected:
            raise BackendError(f"{value.name!r} has rows {list(found.shape)}, expected {list(expected)}")
        self._tables[value.name, count] = found
        return found

    def weight(self, value: Value) -> StoredWeight | None:
        """Return how a static matrix or stack of matrices is stored; None where kernels cannot read it as it is."""
        if value.name not in self._weights:
            self._weights[value.name] = self._stored(value)
        return self._weights[value.name]

    def _stored(self, value: Value) -> StoredWeight | None:
        node = value.producer()
        if node is None:
            name = _FLOAT_FORMATS.get(value.dtype or DataType.UNDEFINED)
            return None if name is None else StoredWeight(name, self._shape(value), self._raw(value))
        source = node.inputs[0] if node.inputs else None
        if source is None:
            return None
        if node.op_type == "DequantizeLinear" and node.domain == "" and _is_unpacked(source):
            return self._quantized(node, source)
        if source.producer() is not None:
            return None
        if node.op_type == "Cast" and node.domain == "" and value.dtype is DataType.FLOAT:
            name = _FLOAT_FORMATS.get(source.dtype or DataType.UNDEFINED)
            return None if name is None else StoredWeight(name, self._shape(source), self._raw(source))
        if node.op_type == "DequantizeLinear" and node.domain == "":
            return self._quantized(node, source)
        return None

    def _quantized(self, node: Node, source: Value) -> StoredWeight | None:
        unpacker = source.producer()
        if unpacker is None:
            known = _SCALED_FORMATS.get(source.dtype or DataType.UNDEFINED)
        else:
            known = (
                _STREAM_FORMATS[unpacker.attributes.get_int("bits")],
                bool(unpacker.attributes.get_int("signed", 0)),
            )
        scales = node.inputs[1]
        shape = self._shape(source)
        if known is None or scales is None or len(shape) < 2:
            return None
        # Floats of 4 bits have scales that are quantized too; what they stand for is computed.
        is_small = known[0] == "f4e2m1"
        if not is_small and (scales.producer() is not None or scales.dtype not in (DataType.FLOAT, DataType.FLOAT16)):
            return None
        axis = node.attributes.get_int("axis", 1) % len(shape)
        block_size = node.attributes.get_int("block_size", 0)
        per_channel = block_size == 0 and axis == 0 and len(shape) == 2 and self._shape(scales) == shape[:1]
        if not per_channel and (block_size < 1 or axis != len(shape) - 1):
            return None
        zero_points = node.inputs[2] if len(node.inputs) > 2 else None
        if zero_points is not None:
            if known[0] not in _ZERO_POINTS or _is_unpacked(zero_points) != (unpacker is not None):
                return None
            if unpacker is None and zero_points.producer() is not None:
                return None
            if unpacker is not None and _signed(zero_points) != known[1]:
                return None
        return StoredWeight(
            known[0],
            shape,
            self._raw(_stored_under(source)),
            self._float_scales(scales) if is_small else self._raw(scales),
            None if zero_points is None else self._raw(_stored_under(zero_points)),
            PER_CHANNEL if per_channel or block_size >= shape[-1] else block_size,
            known[1],
        )

    def _float_scales(self, value: Value) -> StoredArray:
        """Return what quantized scales stand for: float16 where that is exact, else float32."""
        scales = np.asarray(self.array(value), dtype=np.float32)
        magnitudes = np.abs(scales)
        with np.errstate(over="ignore"):
            halves = scales.astype(np.float16)
        if bool(((magnitudes >= _SMALLEST_HALF) | (magnitudes == 0)).all()) and bool((halves == scales).all()):
            return StoredArray("f16", halves)
        return StoredArray("f32", scales)

    def _raw(self, value: Value) -> StoredArray:
        """Return the stored bits of an initializer, memory-mapped where they lie in a weight file."""
        dtype = value.dtype or DataType.UNDEFINED
        known = NATIVE_TYPES.get(dtype)
        if known is None:
            raise BackendError(f"{value.name!r} is stored as {dtype.name}, which no backend reads")
        if value.constant is not None and is_packed(dtype):
            raise BackendError(f"{value.name!r} is a packed constant inside the graph; expected it in a weight file")
        array = to_array(value.constant) if value.constant is not None else self._tensor(value.name)
        return StoredArray(known[0], array.view(known[1]) if array.dtype.itemsize > 0 else array)

    def _elements(self, value: Value) -> Array:
        if value.constant is not None:
            return to_array(value.constant)
        array = self._tensor(value.name)
        dtype = value.dtype or DataType.UNDEFINED
        if dtype in (DataType.INT4, DataType.UINT4):
            return unpack_int4(array, self._shape(value), signed=dtype is DataType.INT4)
        if dtype is DataType.FLOAT4E2M1:
            return unpack_bits(array, 4, self._shape(value)).view(dtype.numpy())
        return array

    @staticmethod
    def _shape(value: Value) -> tuple[int, ...]:
        if value.shape is None or not all(isinstance(size, int) for size in value.shape):
            raise BundleError(f"the initializer {value.name!r} has no fixed shape")
        return tuple(int(size) for size in value.shape if isinstance(size, int))

    def _evaluate(self, node: Node) -> Sequence[Array]:
        inputs = [None if value is None else self.array(value) for value in node.inputs]
        try:
            if node.domain == "" and node.op_type == "Cast" and inputs[0] is not None:
                return (inputs[0].astype(DataType(node.attributes.get_int("to")).numpy()),)
            if node.domain == "" and node.op_type == "DequantizeLinear":
                return (_dequantize(node, inputs),)
            if node.domain == DOMAIN and node.op_type == "UnpackBits" and inputs[0] is not None:
                shape, signed = tuple(node.attributes.get_ints("shape")), bool(node.attributes.get_int("signed", 0))
                return (unpack_bits(inputs[0], node.attributes.get_int("bits"), shape, signed=signed),)
        except (ArithmeticError, LookupError, MemoryError, QuantizationError, TypeError, ValueError) as error:
            raise BackendError(f"{label_of(node)} cannot be computed: {error or type(error).__name__}") from error
        from inferencex.runtime.backends.graph.evaluation import evaluate

        return evaluate(node, inputs)


def _is_unpacked(value: Value) -> bool:
    """Whether a value is integers out of a stored stream that kernels expand themselves."""
    node = value.producer()
    if node is None or node.domain != DOMAIN or node.op_type != "UnpackBits":
        return False
    if node.attributes.get_int("bits") not in _STREAM_FORMATS:
        return False
    return node.inputs[0] is not None and node.inputs[0].producer() is None


def _signed(unpacked: Value) -> bool:
    node = unpacked.producer()
    return node is not None and bool(node.attributes.get_int("signed", 0))


def _stored_under(value: Value) -> Value:
    """Return the initializer that a value is, or is unpacked from."""
    node = value.producer()
    source = value if node is None else node.inputs[0]
    assert source is not None
    return source


def _dequantize(node: Node, inputs: Sequence[Array | None]) -> Array:
    """Compute DequantizeLinear of opset 23 in float32."""
    values, scales = inputs[0], inputs[1]
    assert values is not None and scales is not None
    zero_points = inputs[2] if len(inputs) > 2 else None
    axis = node.attributes.get_int("axis", 1) % max(values.ndim, 1)
    block_size = node.attributes.get_int("block_size", 0)

    def spread(array: Array) -> Array:
        array = array.astype(np.float32)
        if block_size:
            return np.repeat(array, block_size, axis=axis).take(np.arange(values.shape[axis]), axis=axis)
        return array.reshape([-1 if i == axis else 1 for i in range(values.ndim)]) if array.ndim == 1 else array

    result = values.astype(np.float32)
    if zero_points is not None:
        result -= spread(zero_points)
    result *= spread(scales)
    return result

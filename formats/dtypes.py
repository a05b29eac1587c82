"""Element types: one table from the IR's types to numpy's, and to the codes of a safetensors header.

`DataType` has ONNX's names and numbers, and so equals and hashes like `onnx_ir.DataType`, which cannot be used where a
bundle is run: the package brings sympy along, 80 MB on disk and a quarter of a second of every start. Types of less
than a byte are stored packed and flat, as ONNX packs them, and appear in a safetensors header as `U8`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from inferencex.formats.errors import BundleError


class DataType(IntEnum):
    """The element type of a tensor, numbered as in `onnx.TensorProto.DataType`."""

    UNDEFINED = 0
    FLOAT = 1
    UINT8 = 2
    INT8 = 3
    UINT16 = 4
    INT16 = 5
    INT32 = 6
    INT64 = 7
    STRING = 8
    BOOL = 9
    FLOAT16 = 10
    DOUBLE = 11
    UINT32 = 12
    UINT64 = 13
    COMPLEX64 = 14
    COMPLEX128 = 15
    BFLOAT16 = 16
    FLOAT8E4M3FN = 17
    FLOAT8E4M3FNUZ = 18
    FLOAT8E5M2 = 19
    FLOAT8E5M2FNUZ = 20
    UINT4 = 21
    INT4 = 22
    FLOAT4E2M1 = 23
    FLOAT8E8M0 = 24
    UINT2 = 25
    INT2 = 26
    FLOAT6E2M3 = 27
    FLOAT6E3M2 = 28

    @property
    def bitwidth(self) -> int:
        """Bits of an element. Raises BundleError for UNDEFINED and STRING, which have no fixed size."""
        found = _BITWIDTHS.get(self)
        if found is None:
            found = _BITWIDTHS[self] = 8 * self.numpy().itemsize
        return found

    def numpy(self) -> np.dtype[np.generic]:
        """Return the numpy type that holds one element, unpacked. Raises BundleError where there is none."""
        found = _NUMPY_TYPES.get(self)
        if found is None and self in _ML_DTYPES:
            import ml_dtypes

            found = getattr(ml_dtypes, _ML_DTYPES[self])
        if found is None:
            raise BundleError(f"elements of type {self.name} are no numbers; a tensor of a bundle cannot have them")
        return np.dtype(found)


_BITWIDTHS: dict[DataType, int] = {
    DataType.BFLOAT16: 16,
    DataType.FLOAT8E4M3FN: 8,
    DataType.FLOAT8E4M3FNUZ: 8,
    DataType.FLOAT8E5M2: 8,
    DataType.FLOAT8E5M2FNUZ: 8,
    DataType.FLOAT8E8M0: 8,
    DataType.UINT4: 4,
    DataType.INT4: 4,
    DataType.FLOAT4E2M1: 4,
    DataType.UINT2: 2,
    DataType.INT2: 2,
    DataType.FLOAT6E2M3: 6,
    DataType.FLOAT6E3M2: 6,
}

_NUMPY_TYPES: dict[DataType, type[np.generic]] = {
    DataType.FLOAT: np.float32,
    DataType.UINT8: np.uint8,
    DataType.INT8: np.int8,
    DataType.UINT16: np.uint16,
    DataType.INT16: np.int16,
    DataType.INT32: np.int32,
    DataType.INT64: np.int64,
    DataType.BOOL: np.bool_,
    DataType.FLOAT16: np.float16,
    DataType.DOUBLE: np.float64,
    DataType.UINT32: np.uint32,
    DataType.UINT64: np.uint64,
    DataType.COMPLEX64: np.complex64,
    DataType.COMPLEX128: np.complex128,
}

# Those that numpy lacks, by their names in the package ml_dtypes, which is imported when one of them is met.
_ML_DTYPES: dict[DataType, str] = {
    DataType.BFLOAT16: "bfloat16",
    DataType.FLOAT8E4M3FN: "float8_e4m3fn",
    DataType.FLOAT8E4M3FNUZ: "float8_e4m3fnuz",
    DataType.FLOAT8E5M2: "float8_e5m2",
    DataType.FLOAT8E5M2FNUZ: "float8_e5m2fnuz",
    DataType.UINT4: "uint4",
    DataType.INT4: "int4",
    DataType.FLOAT4E2M1: "float4_e2m1fn",
    DataType.FLOAT8E8M0: "float8_e8m0fnu",
    DataType.UINT2: "uint2",
    DataType.INT2: "int2",
    DataType.FLOAT6E2M3: "float6_e2m3fn",
    DataType.FLOAT6E3M2: "float6_e3m2fn",
}

_SAFETENSORS_CODES: dict[DataType, str] = {
    DataType.FLOAT: "F32",
    DataType.FLOAT16: "F16",
    DataType.BFLOAT16: "BF16",
    DataType.DOUBLE: "F64",
    DataType.FLOAT8E4M3FN: "F8_E4M3",
    DataType.FLOAT8E5M2: "F8_E5M2",
    DataType.INT8: "I8",
    DataType.UINT8: "U8",
    DataType.INT16: "I16",
    DataType.UINT16: "U16",
    DataType.INT32: "I32",
    DataType.UINT32: "U32",
    DataType.INT64: "I64",
    DataType.UINT64: "U64",
    DataType.BOOL: "BOOL",
    DataType.INT4: "U8",
    DataType.UINT4: "U8",
    DataType.FLOAT4E2M1: "U8",
    DataType.FLOAT8E8M0: "F8_E8M0",
}

CODE_ITEMSIZES: dict[str, int] = {
    code: dtype.bitwidth // 8 for dtype, code in _SAFETENSORS_CODES.items() if dtype.bitwidth >= 8
}
"""Bytes per element of every safetensors code that a bundle may use."""


_PACKED = frozenset(dtype for dtype, bits in _BITWIDTHS.items() if bits < 8)


def is_packed(dtype: DataType) -> bool:
    """Whether elements are smaller than a byte, and therefore stored packed and flat."""
    return dtype in _PACKED


def safetensors_code(dtype: DataType) -> str:
    """Return the code a safetensors header gives tensors of `dtype`.

    Raises BundleError for a type that bundles do not store.
    """
    code = _SAFETENSORS_CODES.get(dtype)
    if code is None:
        known = ", ".join(sorted(known.name for known in _SAFETENSORS_CODES))
        raise BundleError(f"tensors of type {dtype.name} cannot be stored in a bundle (types that can: {known})")
    return code


def storage_dtype(dtype: DataType) -> np.dtype[np.generic]:
    """Return the numpy type of the stored elements: `uint8` for packed types, else the type itself."""
    return np.dtype(np.uint8) if is_packed(dtype) else dtype.numpy()


def storage_nbytes(dtype: DataType, shape: Sequence[int]) -> int:
    """Return the bytes that a tensor of logical `shape` takes once stored."""
    return (math.prod(shape) * dtype.bitwidth + 7) // 8


def storage_shape(dtype: DataType, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape in the safetensors header: `[nbytes]` for packed types, else the logical shape."""
    return (storage_nbytes(dtype, shape),) if is_packed(dtype) else tuple(shape)

"""Element types: one table from the IR's types to numpy's, and to the codes of a safetensors header.

The IR's vocabulary (`onnx_ir.DataType`) is used throughout. Types of less than a byte are stored packed and flat,
as ONNX packs them, and appear in a safetensors header as `U8`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from onnx_ir import DataType

from inferencex.formats.errors import BundleError

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
}

CODE_ITEMSIZES: dict[str, int] = {
    code: dtype.bitwidth // 8 for dtype, code in _SAFETENSORS_CODES.items() if dtype.bitwidth >= 8
}
"""Bytes per element of every safetensors code that a bundle may use."""


def is_packed(dtype: DataType) -> bool:
    """Whether elements are smaller than a byte, and therefore stored packed and flat."""
    return dtype.bitwidth < 8


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
    if is_packed(dtype):
        return np.dtype(np.uint8)
    numpy_type: np.dtype[np.generic] = dtype.numpy()
    return numpy_type


def storage_nbytes(dtype: DataType, shape: Sequence[int]) -> int:
    """Return the bytes that a tensor of logical `shape` takes once stored."""
    return (math.prod(shape) * dtype.bitwidth + 7) // 8


def storage_shape(dtype: DataType, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape in the safetensors header: `[nbytes]` for packed types, else the logical shape."""
    return (storage_nbytes(dtype, shape),) if is_packed(dtype) else tuple(shape)

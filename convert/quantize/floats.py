"""Weights as floats of 8 and 4 bits: FP8 with scales for channels or groups, NVFP4 and MXFP4 in blocks.

E4M3 and E2M1 numbers, E8M0 scales and MXFP4 are those of OCP Microscaling Formats 1.0; NVFP4 has E4M3 scales for
blocks of 16, and one more scale for the tensor that brings the largest of them into E4M3's range. That one is a power
of two here, so that products of both are exact.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from inferencex.convert.native import _quantize
from inferencex.convert.quantize.base import QuantizedWeight
from inferencex.convert.quantize.rows import LARGEST_HALF, SMALLEST_NORMAL_HALF, Rows, importance_rows
from inferencex.convert.quantize.scheme import TensorScheme
from inferencex.formats.packing import PER_CHANNEL, QuantizedTensor

_LARGEST_E4M3 = 448.0
_LARGEST_E2M1 = 6.0


def quantize_to_floats(
    name: str,
    weight: NDArray[Any],
    scheme: TensorScheme,
    *,
    importance: NDArray[np.float32] | None = None,
    search: bool = True,
    threads: int | None = None,
) -> QuantizedWeight:
    """Quantize `weight`, float32, float16 or bfloat16 `[..., N, K]`, to the floats of `scheme`, group by group along K.

    `search` looks for each group's scale with the least squared error, weighted by `importance` as `quantize_weight`
    says; without it the largest weight becomes the largest number (for MXFP4: the power of two of OCP MX 1.0, section
    6.3). FP8 scales are float16, or float32 when one of them is outside float16's normal range. Raises
    QuantizationError for weights or importances that are not finite, and for shapes that do not fit.
    """
    source = Rows.of(name, weight, scheme.group_size, threads)
    rows, groups = source.shape
    scan = source.scan(8, True)
    largest = scan.largest_scale * 127.0
    tensor_scale = 1.0
    if scheme.type == "fp8":
        smallest = scan.smallest_scale * 127.0 / _LARGEST_E4M3
        half = smallest >= 2 * SMALLEST_NORMAL_HALF and largest / _LARGEST_E4M3 <= LARGEST_HALF / 2
        kind = "float16" if half else "float32"
    elif scheme.type == "nvfp4":
        kind = "e4m3"
        tensor_scale = _power_of_two_above(largest / (_LARGEST_E2M1 * _LARGEST_E4M3))
    else:
        kind = "power_of_two"
    is_wide = scheme.bits == 8
    values = np.zeros(weight.size if is_wide else (weight.size + 1) // 2, dtype=np.uint8)
    scales = np.empty((rows, groups), dtype=np.float32)
    errors, norms = np.empty(rows), np.empty(rows)
    _quantize.quantize_to_floats(
        source.data,
        source.element,
        source.group_size,
        scheme.number,
        kind,
        tensor_scale,
        search,
        importance_rows(name, importance, weight.shape),
        values,
        scales,
        errors,
        norms,
        source.threads,
    )
    scale_shape = weight.shape[:-1] if scheme.group_size == PER_CHANNEL else (*weight.shape[:-1], groups)
    tensor = QuantizedTensor(
        values=values.view(ml_dtypes.float8_e4m3fn).reshape(weight.shape) if is_wide else values,
        scales=(scales / np.float32(tensor_scale)).astype(_SCALE_TYPES[kind]).reshape(scale_shape),
        zero_points=None,
        bits=scheme.bits,
        group_size=scheme.group_size,
        symmetric=True,
        shape=weight.shape,
        number=scheme.number,
        tensor_scale=np.array(tensor_scale, dtype=np.float32) if kind == "e4m3" else None,
    )
    return QuantizedWeight(tensor, float(errors.sum()), float(norms.sum()))


_SCALE_TYPES: dict[str, type[np.generic]] = {
    "float16": np.float16,
    "float32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "power_of_two": ml_dtypes.float8_e8m0fnu,
}


def _power_of_two_above(value: float) -> float:
    """Return the smallest power of two that is not below `value`; 1 for 0."""
    if value == 0.0:
        return 1.0
    mantissa, exponent = math.frexp(value)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)

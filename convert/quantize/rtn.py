"""Round to nearest: each group of weights gets the range that loses least, and every weight the nearest integer."""

from __future__ import annotations

import os
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from inferencex.convert.native import _quantize
from inferencex.convert.quantize.base import Calibration, QuantizedWeight, register
from inferencex.convert.quantize.scheme import TensorScheme
from inferencex.formats.errors import QuantizationError
from inferencex.formats.packing import PER_CHANNEL, QuantizedTensor, group_count

_SMALLEST_NORMAL_HALF = 2.0**-14
_LARGEST_HALF = 65504.0


def quantize_weight(
    name: str,
    weight: NDArray[Any],
    scheme: TensorScheme,
    *,
    importance: NDArray[np.float32] | None = None,
    search: bool = True,
    threads: int | None = None,
) -> QuantizedWeight:
    """Quantize `weight`, float32, float16 or bfloat16 `[..., N, K]`, group by group along K.

    `search` looks for the range of each group that gives the least squared error, each weight's counted with its
    `importance`: float32 `[K]` by input channel, or `[E, K]` for `[E, N, K]`. Without one, or where a group's are all
    zero, w^2 + mean(w^2) over the group is used: the plain squared error clips large weights, which was measured to
    make whole models worse than no search at all. The weighted error is never larger than that of the full range,
    which is what is used without `search`. Scales are float16, or float32 when one of them is
    outside float16's normal range; errors are measured with the scale as it is stored. Groups whose weights are all
    below 2^-100 become zeros. The result does not depend on `threads`.

    Raises QuantizationError for weights or importances that are not finite, and for shapes that do not fit.
    """
    if weight.ndim < 2 or weight.size == 0:
        raise QuantizationError(f"{name}: shape {list(weight.shape)} cannot be quantized, expected [..., N, K]")
    if scheme.group_size == PER_CHANNEL and weight.ndim != 2:
        raise QuantizationError(
            f"{name}: shape {list(weight.shape)} cannot be quantized per channel, only matrices can"
        )
    channels = weight.shape[-1]
    rows = weight.size // channels
    group_size = channels if scheme.group_size == PER_CHANNEL else scheme.group_size
    groups = group_count(channels, group_size)
    element, data = _elements(name, weight)
    data = data.reshape(rows, channels)
    workers = threads if threads is not None else len(os.sched_getaffinity(0))
    scan = _quantize.scan(data, element, group_size, scheme.bits, scheme.symmetric, workers)
    if scan.first_bad >= 0:
        index = tuple(int(i) for i in np.unravel_index(scan.first_bad, weight.shape))
        raise QuantizationError(f"{name}: the weight at {list(index)} is {weight[index]}; the checkpoint is damaged")
    half = scan.smallest_scale >= _SMALLEST_NORMAL_HALF and scan.largest_scale <= _LARGEST_HALF
    value_bytes = (weight.size * scheme.bits + 7) // 8
    values = np.zeros(value_bytes, dtype=np.uint8)
    scales = np.empty((rows, groups), dtype=np.float32)
    zero_points = np.zeros(0 if scheme.symmetric else (rows * groups * scheme.bits + 7) // 8, dtype=np.uint8)
    errors, norms = np.empty(rows), np.empty(rows)
    _quantize.quantize(
        data,
        element,
        group_size,
        scheme.bits,
        scheme.symmetric,
        half,
        search,
        _importance(name, importance, weight.shape),
        values,
        scales,
        zero_points,
        errors,
        norms,
        workers,
    )
    scale_shape = weight.shape[:-1] if scheme.group_size == PER_CHANNEL else (*weight.shape[:-1], groups)
    tensor = QuantizedTensor(
        values=values if scheme.bits == 4 else values.view(np.int8).reshape(weight.shape),
        scales=(scales.astype(np.float16) if half else scales).reshape(scale_shape),
        zero_points=None
        if scheme.symmetric
        else (zero_points if scheme.bits == 4 else zero_points.view(np.int8).reshape(scale_shape)),
        bits=scheme.bits,
        group_size=scheme.group_size,
        symmetric=scheme.symmetric,
        shape=weight.shape,
    )
    return QuantizedWeight(tensor, float(errors.sum()), float(norms.sum()))


def _elements(name: str, weight: NDArray[Any]) -> tuple[str, NDArray[Any]]:
    """Return the element type's name, and the weight in a form the native module can read without copying."""
    contiguous = np.require(weight, requirements=["C", "A"])
    if weight.dtype == np.float32:
        return "float32", contiguous
    if weight.dtype == np.float16:
        return "float16", contiguous.view(np.uint16)
    if weight.dtype == ml_dtypes.bfloat16:
        return "bfloat16", contiguous.view(np.uint16)
    raise QuantizationError(f"{name}: weights of type {weight.dtype}, expected float32, float16 or bfloat16")


def _importance(name: str, importance: NDArray[np.float32] | None, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return the importance as `[matrices, K]`, with no rows when there is none."""
    channels = shape[-1]
    if importance is None:
        return np.empty((0, channels), dtype=np.float32)
    if importance.shape not in ((channels,), (*shape[:-2], channels)):
        raise QuantizationError(
            f"{name}: importance of shape {list(importance.shape)} does not fit the weight {list(shape)}, "
            f"expected {[channels]} or {[*shape[:-2], channels]}"
        )
    if not np.isfinite(importance).all() or (importance < 0).any():
        raise QuantizationError(f"{name}: importances must be finite and not negative")
    return np.ascontiguousarray(importance.reshape(-1, channels), dtype=np.float32)


class RoundToNearest:
    """Round to nearest, range by squared-error search; needs no calibration and uses it when there is one."""

    name = "rtn"
    types: tuple[str, ...] = ("int4", "int8")
    needs_calibration = False

    def quantize(
        self,
        name: str,
        weight: NDArray[Any],
        scheme: TensorScheme,
        calibration: Calibration | None = None,
        *,
        threads: int | None = None,
    ) -> QuantizedWeight:
        """Quantize one weight; see `Method.quantize`."""
        importance = None if calibration is None else calibration.mean_square
        return quantize_weight(name, weight, scheme, importance=importance, threads=threads)


register(RoundToNearest())

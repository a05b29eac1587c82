"""Round to nearest: each group of weights gets the range that loses least, and every weight the nearest number."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferencex.convert.native import _quantize
from inferencex.convert.quantize.base import Calibration, QuantizedWeight, register
from inferencex.convert.quantize.floats import quantize_to_floats
from inferencex.convert.quantize.rows import LARGEST_HALF, SMALLEST_NORMAL_HALF, Rows, importance_rows
from inferencex.convert.quantize.scheme import TensorScheme
from inferencex.formats.packing import PER_CHANNEL, QuantizedTensor, pack_bits


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
    if scheme.number != "int":
        return quantize_to_floats(name, weight, scheme, importance=importance, search=search, threads=threads)
    source = Rows.of(name, weight, scheme.group_size, threads)
    rows, groups = source.shape
    scan = source.scan(scheme.bits, scheme.symmetric)
    half = scan.smallest_scale >= SMALLEST_NORMAL_HALF and scan.largest_scale <= LARGEST_HALF
    # The native code packs 4 bits, and leaves a byte to every integer of other sizes.
    nibbles = scheme.bits == 4

    def places(count: int) -> int:
        return (count + 1) // 2 if nibbles else count

    values = np.zeros(places(weight.size), dtype=np.uint8)
    scales = np.empty((rows, groups), dtype=np.float32)
    zero_points = np.zeros(0 if scheme.symmetric else places(rows * groups), dtype=np.uint8)
    errors, norms = np.empty(rows), np.empty(rows)
    _quantize.quantize(
        source.data,
        source.element,
        source.group_size,
        scheme.bits,
        scheme.symmetric,
        half,
        search,
        importance_rows(name, importance, weight.shape),
        values,
        scales,
        zero_points,
        errors,
        norms,
        source.threads,
    )
    scale_shape = weight.shape[:-1] if scheme.group_size == PER_CHANNEL else (*weight.shape[:-1], groups)

    def stored(integers: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[Any]:
        if scheme.bits == 8:
            return integers.view(np.int8).reshape(shape)
        return integers if nibbles else pack_bits(integers, scheme.bits)

    tensor = QuantizedTensor(
        values=stored(values, weight.shape),
        scales=(scales.astype(np.float16) if half else scales).reshape(scale_shape),
        zero_points=None if scheme.symmetric else stored(zero_points, scale_shape),
        bits=scheme.bits,
        group_size=scheme.group_size,
        symmetric=scheme.symmetric,
        shape=weight.shape,
    )
    return QuantizedWeight(tensor, float(errors.sum()), float(norms.sum()))


class RoundToNearest:
    """Round to nearest, range by squared-error search; needs no calibration and uses it when there is one."""

    name = "rtn"
    types: tuple[str, ...] = ("int3", "int4", "int5", "int6", "int8", "fp8", "nvfp4", "mxfp4")
    needs_calibration = False
    needs_gram = False

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

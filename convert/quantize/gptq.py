"""GPTQ: rounding one input channel after another, each error made good by the channels that come later.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", arXiv 2210.17323.
Channels are visited in the order of falling mean square; the ranges of groups are searched beforehand, on the channels
as they are stored, so that this order costs nothing at run time. Afterwards integers and scales are improved by
coordinate descent on the same objective, the error of the outputs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferencex.convert.native import _error_feedback
from inferencex.convert.quantize.base import Calibration, QuantizedWeight, register
from inferencex.convert.quantize.output_error import checked_gram
from inferencex.convert.quantize.rows import LARGEST_HALF, SMALLEST_NORMAL_HALF
from inferencex.convert.quantize.rtn import quantize_weight
from inferencex.convert.quantize.scheme import TensorScheme
from inferencex.formats.errors import QuantizationError
from inferencex.formats.packing import QuantizedTensor, pack_bits

_MORE_DAMPING = 10.0
_ATTEMPTS = 4
_UNSEEN = "rounded to nearest: no calibration token reached it"


class Gptq:
    """GPTQ with static groups, activation order and coordinate descent.

    damping:  added to the diagonal of the Gram matrix, as a fraction of its mean; ten times as much, up to three times
              over, where rounding of float32 makes the matrix indefinite
    sweeps:   passes of coordinate descent over all channels and scales; each costs four times what rounding costs
    """

    name = "gptq"
    types: tuple[str, ...] = ("int3", "int4", "int5", "int6", "int8")
    needs_calibration = True
    needs_gram = True

    def __init__(self, damping: float = 0.03, sweeps: int = 4) -> None:
        """Take the settings; the defaults are those the name `gptq` stands for."""
        self.damping = damping
        self.sweeps = sweeps

    def quantize(
        self,
        name: str,
        weight: NDArray[Any],
        scheme: TensorScheme,
        calibration: Calibration | None = None,
        *,
        threads: int | None = None,
    ) -> QuantizedWeight:
        """Quantize one weight, a matrix or a stack of experts; see `Method.quantize`.

        A matrix whose inputs were never seen, or always zero, is rounded to nearest, and the result's remark says so.
        Raises QuantizationError also where the Gram matrix is missing, not finite or not positive.
        """
        if scheme.number != "int":
            raise QuantizationError(f"{name}: gptq makes integers, not {scheme.type}; use rtn-{scheme.type}")
        if calibration is None:
            raise QuantizationError(f"{name}: gptq needs calibration data")
        mean_square, channels = calibration.mean_square, weight.shape[-1]
        stack = weight.shape[:-2]
        if stack and mean_square.ndim == 1:
            raise QuantizationError(
                f"{name}: a weight {list(weight.shape)} needs statistics of each matrix, "
                f"found {list(mean_square.shape)}"
            )
        # With error feedback a channel's own error counts less than its mean square says, as others make it good.
        importance = np.sqrt(mean_square) if calibration.tokens else None
        nearest = quantize_weight(name, weight, scheme, importance=importance, threads=threads)
        if not calibration.tokens or not mean_square.any():
            return replace(nearest, remark=_UNSEEN)
        workers = threads if threads is not None else len(os.sched_getaffinity(0))
        matrices = np.ascontiguousarray(weight, dtype=np.float32).reshape(-1, weight.shape[-2], channels)
        grams = [calibration.gram] if not stack or calibration.gram is None else list(calibration.gram)
        if len(grams) != len(matrices):
            raise QuantizationError(f"{name}: {len(matrices)} matrices, but Gram matrices of {len(grams)}")
        levels = _Levels.of(nearest.tensor, len(matrices))
        error, unseen, damping = 0.0, [], self.damping
        for index, (matrix, gram) in enumerate(zip(matrices, grams, strict=True)):
            label = f"{name}[{index}]" if stack else name
            checked = checked_gram(label, gram, channels)
            if checked.diagonal().any():
                found, used = self._round(label, matrix, checked, levels, index, workers)
                error, damping = error + found, max(damping, used)
            else:
                unseen.append(index)
                error += levels.error(index, matrix)
        remarks = []
        if unseen:
            remarks.append(f"{_UNSEEN}: {', '.join(map(str, unseen))}")
        if damping > self.damping:
            remarks.append(f"damping raised to {damping:g}: the inputs' Gram matrix is nearly singular")
        return QuantizedWeight(levels.packed(nearest.tensor), error, nearest.squared_norm, "; ".join(remarks))

    def _round(
        self,
        name: str,
        matrix: NDArray[np.float32],
        gram: NDArray[np.float32],
        levels: _Levels,
        index: int,
        threads: int,
    ) -> tuple[float, float]:
        """Round one matrix into `levels`; return its squared error and the damping that was needed."""
        diagonal = gram.diagonal()
        mean = float(diagonal.mean(dtype=np.float64))
        order = np.argsort(-diagonal, kind="stable")
        factor = np.empty_like(gram)
        for attempt in range(_ATTEMPTS):
            damping = self.damping * _MORE_DAMPING**attempt
            ridge = max(damping * mean, float(np.finfo(np.float32).tiny))
            # Exactly, no pivot is below the ridge.
            if _error_feedback.factorize(gram, order, ridge, ridge / 2, factor, threads):
                break
        else:
            raise QuantizationError(
                f"{name}: the Gram matrix of its inputs is not positive, even with {damping:g} of its mean diagonal "
                "added; its sums were not taken in float32"
            )
        scales, zero_points, integers = levels.scales[index], levels.zero_points[index], levels.integers[index]
        group, (low, high), errors = levels.group_size, levels.limits, np.empty(matrix.shape[0])
        _error_feedback.round(matrix, factor, order, scales, zero_points, group, low, high, integers, errors, threads)
        del factor
        if self.sweeps:
            smallest, largest = levels.scale_limits
            _error_feedback.descend(
                matrix, gram, scales, zero_points, group, low, high, ridge, self.sweeps, levels.half, smallest, largest,
                integers, errors, threads,
            )  # fmt: skip
        return float(errors.sum()), damping


@dataclass(frozen=True, eq=False)
class _Levels:
    """A quantized tensor unpacked for the native code, float32: matrices first, then rows, then channels or groups."""

    integers: NDArray[np.float32]
    scales: NDArray[np.float32]
    zero_points: NDArray[np.float32]
    group_size: int
    limits: tuple[float, float]
    half: bool

    @classmethod
    def of(cls, tensor: QuantizedTensor, matrices: int) -> _Levels:
        rows, channels = tensor.shape[-2:]
        scales = tensor.scales.astype(np.float32).reshape(matrices, rows, -1)
        zero_points = tensor.zero_point_integers()
        half_range = 1 << (tensor.bits - 1)
        unsigned = tensor.bits < 8 and not tensor.symmetric
        return cls(
            integers=tensor.integers().astype(np.float32).reshape(matrices, rows, channels),
            scales=scales,
            zero_points=np.zeros_like(scales)
            if zero_points is None
            else zero_points.astype(np.float32).reshape(scales.shape),
            group_size=channels if tensor.group_size < 1 else min(tensor.group_size, channels),
            limits=(0.0, 2.0 * half_range - 1) if unsigned else (-float(half_range), half_range - 1.0),
            half=tensor.scales.dtype == np.float16,
        )

    @property
    def scale_limits(self) -> tuple[float, float]:
        """Smallest and largest scale that can be stored."""
        if self.half:
            return SMALLEST_NORMAL_HALF, LARGEST_HALF
        return float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)

    def error(self, index: int, matrix: NDArray[np.float32]) -> float:
        """Return the squared error of one matrix as it stands."""
        channels = matrix.shape[-1]

        def spread(values: NDArray[np.float32]) -> NDArray[np.float32]:
            return np.repeat(values, self.group_size, axis=-1)[:, :channels]

        levels = self.integers[index] - spread(self.zero_points[index])
        return float(np.square((matrix - levels * spread(self.scales[index])).astype(np.float64)).sum())

    def packed(self, tensor: QuantizedTensor) -> QuantizedTensor:
        """Return the tensor with these integers and scales."""
        integers = self.integers.astype(np.int16).astype(np.int8)
        return replace(
            tensor,
            values=integers.reshape(tensor.shape) if tensor.bits == 8 else pack_bits(integers, tensor.bits),
            scales=self.scales.astype(tensor.scales.dtype).reshape(tensor.scales.shape),
        )


register(Gptq())

"""What factors of input channels do to statistics, to weights that are running, and to weights as they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferencex.convert.calibrate.blocks import Block
from inferencex.convert.calibrate.sharing import SharedInput
from inferencex.convert.calibrate.work_dir import FinishedBlock
from inferencex.convert.quantize.base import Calibration
from inferencex.formats.packing import QuantizedTensor


def scaled(statistics: Calibration, factors: NDArray[np.float32]) -> Calibration:
    """Return the statistics of an input once it is divided by `factors`, float32 `[K]`."""
    peaks, gram = statistics.absolute_max, statistics.gram
    return replace(
        statistics,
        mean_square=(statistics.mean_square / np.square(factors)).astype(np.float32),
        absolute_max=None if peaks is None else peaks / factors,
        gram=None if gram is None else gram / factors[:, None] / factors[None, :],
    )


def effective_weights(shared: SharedInput, finished: FinishedBlock) -> dict[str, Tensor]:
    """Return the quantized readers of an input as they act on it undivided: float32, columns divided by the factors."""
    factors = finished.factors.get(shared.value)
    weights = {}
    for name in shared.readers:
        if name in finished.quantized:
            weight = finished.quantized[name].dequantize()
            weights[name] = torch.from_numpy(weight if factors is None else weight / factors)
    return weights


def absorb(block: Block, originals: Mapping[str, Tensor], finished: FinishedBlock) -> None:
    """Divide what computes the inputs of a block by their factors: plain tensors now, quantized ones when written.

    A quantized weight is divided row by row through its scales, after everything else is known of it.
    """
    for shared in (shared for stage in block.stages for shared in stage.shared):
        factors = finished.factors.get(shared.value)
        if factors is None or shared.absorber is None:
            continue
        rows = shared.absorber.rows
        for name in shared.absorber.tensors:
            divisors = np.ones(originals[name].shape[0], dtype=np.float32)
            divisors[rows] = factors
            if name in finished.quantized:
                before = finished.row_divisors.get(name)
                finished.row_divisors[name] = divisors if before is None else before * divisors
            else:
                plain: NDArray[np.float32] = finished.plain.get(name, originals[name].to(torch.float32).numpy())
                finished.plain[name] = plain / divisors.reshape(-1, *[1] * (plain.ndim - 1))


def with_divided_rows(tensor: QuantizedTensor, divisors: NDArray[np.float32]) -> QuantizedTensor:
    """Divide the rows of a quantized matrix `[N, K]` by `divisors [N]`; float16 scales that leave its range grow."""
    scales = tensor.scales.astype(np.float32) / divisors.reshape(-1, *[1] * (tensor.scales.ndim - 1))
    smallest, largest = float(np.abs(scales).min()), float(np.abs(scales).max())
    half = tensor.scales.dtype == np.float16 and smallest >= 2.0**-14 and largest <= 65504.0
    return replace(tensor, scales=scales.astype(np.float16) if half else scales)

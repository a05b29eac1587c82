"""AWQ: channels that carry large inputs get finer integers, through factors that what is in front absorbs.

Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", arXiv 2306.00978.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from inferencex.convert.quantize.base import Calibration, register_folding
from inferencex.convert.quantize.output_error import checked_gram, output_error
from inferencex.convert.quantize.rtn import quantize_weight
from inferencex.convert.quantize.scheme import TensorScheme
from inferencex.convert.quantize.tied_factors import checked_statistics, tied

_ROWS = 256
_LEAST_GAIN = 0.002  # of the error; less is noise, and factors of 1 need no absorbing


class Awq:
    """Factors `x^a / w^b`, with the root mean squares of inputs and of weights by channel, a and b from a grid.

    Each pair is judged by the error of the outputs after rounding to nearest, over at most 256 evenly spaced rows of
    each weight, from the Gram matrix of the inputs or its diagonal.
    """

    name = "awq"
    needs_gram = True

    def __init__(
        self,
        input_powers: tuple[float, ...] = (0.0, 0.15, 0.3, 0.45, 0.6),
        weight_powers: tuple[float, ...] = (0.0, 0.3, 0.6),
    ) -> None:
        """Take the grid; the defaults are those the name `awq` stands for."""
        self.input_powers = input_powers
        self.weight_powers = weight_powers

    def scales(
        self,
        name: str,
        weights: Sequence[NDArray[np.float32]],
        schemes: Sequence[TensorScheme],
        calibration: Calibration,
        *,
        ties: NDArray[np.int64] | None = None,
        threads: int | None = None,
    ) -> NDArray[np.float32]:
        """Choose the factors of the input `name`; see `Folding.scales`."""
        channels = checked_statistics(name, weights, schemes, calibration, ties)
        ones = np.ones(channels, dtype=np.float32)
        if not weights or not calibration.tokens or not calibration.mean_square.any():
            return ones
        if calibration.gram is not None:
            checked_gram(name, calibration.gram, channels)
        samples = [np.ascontiguousarray(weight[_evenly(len(weight))], dtype=np.float32) for weight in weights]
        inputs = np.sqrt(calibration.mean_square.astype(np.float64))
        total = sum(np.square(weight.astype(np.float64)).sum(axis=0) for weight in samples)
        magnitudes = np.sqrt(np.asarray(total))
        if not magnitudes.any():
            return ones

        def error(factors: NDArray[np.float32]) -> float:
            importance = (calibration.mean_square / np.square(factors)).astype(np.float32)
            result = 0.0
            for weight, sample, scheme in zip(weights, samples, schemes, strict=True):
                scaled = sample * factors
                rounded = quantize_weight(name, scaled, scheme, importance=importance, threads=threads)
                difference = ((rounded.tensor.dequantize() - scaled) / factors).astype(np.float32, copy=False)
                result += output_error(difference, calibration, threads=threads) * len(weight) / len(sample)
            return result

        best, least = ones, error(ones) * (1 - _LEAST_GAIN)
        for input_power, weight_power in product(self.input_powers, self.weight_powers):
            if input_power == 0 and weight_power == 0:
                continue
            raw = input_power * _log(inputs) - weight_power * _log(magnitudes)
            candidate = tied(raw, ties)
            found = error(candidate)
            if found < least:
                best, least = candidate, found
        return best


def _evenly(rows: int) -> NDArray[np.int64]:
    """Return the indices of at most `_ROWS` evenly spaced rows."""
    count = min(rows, _ROWS)
    return np.arange(count, dtype=np.int64) * rows // count


def _log(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return logarithms, of channels that are all but dead as of the least of the others."""
    logarithms: NDArray[np.float64] = np.log(np.maximum(values, values.max() * 1e-4))
    return logarithms


register_folding(Awq())

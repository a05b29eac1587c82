"""SmoothQuant: factors that move the range of activations to the weights, so that 8 bits suffice for both.

Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models", arXiv
2211.10438: `s_j = max|x_j|^a / max|w_j|^(1 - a)`, here with `a` chosen for each input that linears share. Where each
token has a scale of its own, root mean squares stand in for the maxima of both: what the largest token of all needs
matters to that token alone, and factors made for it cost all others accuracy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inferencex.convert.quantize.base import Calibration, register_folding
from inferencex.convert.quantize.output_error import checked_gram, output_error
from inferencex.convert.quantize.rtn import quantize_weight
from inferencex.convert.quantize.scheme import TensorScheme
from inferencex.convert.quantize.tied_factors import checked_statistics, tied
from inferencex.formats.errors import QuantizationError

_ROWS = 256
_LARGEST_INTEGER = 127.0


class SmoothQuant:
    """Factors by the paper's formula, its exponent from a grid.

    Each exponent is judged by the error of the outputs: what rounding the weights adds, over at most 256 evenly spaced
    rows of each, and what rounding the inputs adds, as noise of a twelfth of the squared step. The step follows from
    the largest magnitude of any channel where activations have static scales; where each token has its own, from the
    4-norm of the channels' root mean squares, which stands for a token's largest one.
    """

    name = "smoothquant"
    needs_gram = True

    def __init__(self, exponents: tuple[float, ...] = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)) -> None:
        """Take the grid; the default is what the name `smoothquant` stands for."""
        self.exponents = exponents

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
        """Choose the factors of the input `name`; needs `absolute_max`. See `Folding.scales`."""
        channels = checked_statistics(name, weights, schemes, calibration, ties)
        ones = np.ones(channels, dtype=np.float32)
        if not weights or not calibration.tokens or not calibration.mean_square.any():
            return ones
        if calibration.gram is not None:
            checked_gram(name, calibration.gram, channels)
        if calibration.absolute_max is None or calibration.absolute_max.shape != (channels,):
            raise QuantizationError(f"{name}: smoothquant needs the largest magnitude of each of {channels} channels")
        inputs = calibration.absolute_max.astype(np.float64)
        largest = np.max([np.abs(weight).max(axis=0) for weight in weights], axis=0).astype(np.float64)
        if not largest.any() or not np.isfinite(inputs).all():
            return ones
        static = any(scheme.activation is not None and scheme.activation.static for scheme in schemes)
        squares = [np.square(weight.astype(np.float64)).sum(axis=0) for weight in weights]
        energy = np.sum(squares, axis=0)

        def error(factors: NDArray[np.float32]) -> float:
            wide = factors.astype(np.float64)
            if static:
                peak = float((inputs / wide).max())
            else:
                peak = float(np.square(calibration.mean_square / wide**2).sum() ** 0.25)
            result = (peak / _LARGEST_INTEGER) ** 2 / 12 * float((energy * wide**2).sum())
            importance = (calibration.mean_square / np.square(factors)).astype(np.float32)
            for weight, scheme in zip(weights, schemes, strict=True):
                count = min(len(weight), _ROWS)
                scaled = weight[np.arange(count) * len(weight) // count] * factors
                rounded = quantize_weight(name, scaled, scheme, importance=importance, threads=threads)
                difference = ((rounded.tensor.dequantize() - scaled) / factors).astype(np.float32, copy=False)
                result += output_error(difference, calibration, threads=threads) * len(weight) / count
            return result

        reaches = largest if static else np.sqrt(energy)
        if not static:
            inputs = np.sqrt(calibration.mean_square.astype(np.float64))
        best, least = ones, error(ones)
        for exponent in self.exponents:
            candidate = tied(exponent * _log(inputs) - (1 - exponent) * _log(reaches), ties)
            found = error(candidate)
            if found < least:
                best, least = candidate, found
        return best


def _log(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return logarithms, of channels that are all but dead as of the least of the others."""
    logarithms: NDArray[np.float64] = np.log(np.maximum(values, values.max() * 1e-5))
    return logarithms


register_folding(SmoothQuant())

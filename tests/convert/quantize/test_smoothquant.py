from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from inferencex.convert.quantize import TensorScheme, quantize_weight
from inferencex.convert.quantize.base import Calibration, folding_named
from inferencex.convert.quantize.scheme import ActivationScheme
from inferencex.convert.quantize.smoothquant import SmoothQuant
from inferencex.formats.errors import QuantizationError
from inferencex.formats.packing import PER_CHANNEL
from tests.convert.quantize.inputs import heavy_tailed, statistics_of

DYNAMIC = TensorScheme("int8", PER_CHANNEL, True, ActivationScheme("int8"))
STATIC = TensorScheme("int8", PER_CHANNEL, True, ActivationScheme("int8", static=True))


def outlying_inputs(tokens: int, channels: int, seed: int = 3) -> NDArray[np.float32]:
    """Return inputs of which two channels are sixty times as large as the others."""
    inputs = np.random.default_rng(seed).normal(size=(tokens, channels)).astype(np.float32)
    inputs[:, [7, 40]] *= 60
    return inputs


def rounded_inputs(inputs: NDArray[np.float32], static: bool) -> NDArray[np.float64]:
    peaks = np.abs(inputs).max(axis=None if static else 1, keepdims=True)
    steps = peaks.astype(np.float64) / 127
    rounded: NDArray[np.float64] = np.clip(np.rint(inputs / steps), -127, 127) * steps
    return rounded


def relative_error(
    weight: NDArray[np.float32], inputs: NDArray[np.float32], factors: NDArray[np.float32], static: bool
) -> float:
    """Return the error of the outputs with weights and inputs of 8 bits, relative to the outputs."""
    quantized = quantize_weight("w", weight * factors, DYNAMIC).tensor.dequantize()
    exact = inputs.astype(np.float64) @ weight.T.astype(np.float64)
    found = rounded_inputs(inputs / factors, static) @ quantized.T.astype(np.float64)
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("static", [False, True])
def test_outlying_channels_move_to_the_weights(static: bool) -> None:
    weight, inputs = heavy_tailed((60, 128)), outlying_inputs(800, 128)
    scheme = STATIC if static else DYNAMIC
    factors = folding_named("smoothquant").scales("x", [weight], [scheme], statistics_of(inputs))
    assert factors[[7, 40]].min() > 3 * np.delete(factors, [7, 40]).mean()
    fresh = outlying_inputs(400, 128, seed=9)
    errors = {
        alpha: relative_error(weight, fresh, papers_factors(weight, inputs, alpha), static)
        for alpha in (0.3, 0.5, 0.7, 0.9)
    }
    found = relative_error(weight, fresh, factors, static)
    assert found < 0.5 * relative_error(weight, fresh, np.ones_like(factors), static)
    assert found < 1.15 * min(errors.values())


def papers_factors(weight: NDArray[np.float32], inputs: NDArray[np.float32], alpha: float) -> NDArray[np.float32]:
    factors: NDArray[np.float32] = np.abs(inputs).max(axis=0) ** alpha / np.abs(weight).max(axis=0) ** (1 - alpha)
    return factors


def test_factors_are_the_papers_up_to_a_common_one() -> None:
    weights = [heavy_tailed((30, 64)), heavy_tailed((50, 64), seed=8) * 2]
    inputs = outlying_inputs(300, 64)
    factors = SmoothQuant(exponents=(0.6,)).scales("x", weights, [STATIC, STATIC], statistics_of(inputs))
    ratio = factors / papers_factors(np.concatenate(weights), inputs, 0.6)
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-4)


def test_with_a_scale_for_each_token_root_mean_squares_stand_in_for_maxima() -> None:
    weight, inputs = heavy_tailed((30, 64)), outlying_inputs(300, 64)
    factors = SmoothQuant(exponents=(0.6,)).scales("x", [weight], [DYNAMIC], statistics_of(inputs))
    expected = np.sqrt(np.square(inputs).mean(axis=0)) ** 0.6 / np.linalg.norm(weight, axis=0) ** 0.4
    ratio = factors / expected
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-4)


def test_tied_channels_share_a_factor() -> None:
    weight, ties = heavy_tailed((60, 128)), np.arange(128, dtype=np.int64) % 32
    factors = SmoothQuant().scales("x", [weight], [DYNAMIC], statistics_of(outlying_inputs(300, 128)), ties=ties)
    assert all(len(set(factors[ties == tie].tolist())) == 1 for tie in range(32))
    assert factors.max() > factors.min()


def test_threads_do_not_matter() -> None:
    weight, calibration = heavy_tailed((300, 96)), statistics_of(outlying_inputs(300, 96))
    outcomes = [SmoothQuant().scales("x", [weight], [DYNAMIC], calibration, threads=n).tobytes() for n in (1, 3)]
    assert outcomes[0] == outcomes[1]


def test_inputs_that_say_nothing_have_no_factors() -> None:
    weight, zeros = heavy_tailed((10, 64)), np.zeros(64, np.float32)
    for calibration in (Calibration(zeros, None, zeros, 0), Calibration(zeros, None, zeros, 9)):
        assert (SmoothQuant().scales("x", [weight], [DYNAMIC], calibration) == 1).all()
    seen = statistics_of(outlying_inputs(50, 64))
    assert (SmoothQuant().scales("x", [weight * 0], [DYNAMIC], seen) == 1).all()
    with pytest.raises(QuantizationError, match="x: smoothquant needs the largest magnitude of each of 64 channels"):
        SmoothQuant().scales("x", [weight], [DYNAMIC], replace(seen, absolute_max=None))

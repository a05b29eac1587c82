from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from inferencex.convert.quantize import TensorScheme, quantize_weight
from inferencex.convert.quantize.awq import Awq
from inferencex.convert.quantize.base import Calibration, folding_named
from inferencex.convert.quantize.output_error import output_error
from inferencex.formats.errors import QuantizationError
from tests.convert.quantize import gptq_reference
from tests.convert.quantize.inputs import heavy_tailed, statistics_of

INT4 = TensorScheme("int4", 32, False)


def uneven_inputs(tokens: int, channels: int, seed: int = 3) -> NDArray[np.float32]:
    """Return inputs of which one channel in sixteen is thirty times as large as the others."""
    inputs = np.random.default_rng(seed).normal(size=(tokens, channels)).astype(np.float32)
    inputs[:, ::16] *= 30
    return inputs


def folded_error(weight: NDArray[np.float32], factors: NDArray[np.float32], calibration: Calibration) -> float:
    assert calibration.gram is not None
    rounded = quantize_weight("w", weight * factors, INT4, importance=calibration.mean_square / factors**2)
    return gptq_reference.output_error(weight, rounded.tensor.dequantize() / factors, calibration.gram)


@pytest.mark.parametrize("with_gram", [True, False])
def test_large_inputs_get_finer_integers(with_gram: bool) -> None:
    weights = [heavy_tailed((40, 128)), heavy_tailed((24, 128), seed=5)]
    calibration = statistics_of(uneven_inputs(500, 128))
    given = calibration if with_gram else replace(calibration, gram=None)
    factors = folding_named("awq").scales("x", weights, [INT4, INT4], given)
    assert factors.dtype == np.float32 and factors.shape == (128,)
    assert factors[::16].min() > 1.3 * np.delete(factors, np.s_[::16]).mean()
    ones = np.ones_like(factors)
    before = sum(folded_error(weight, ones, calibration) for weight in weights)
    assert sum(folded_error(weight, factors, calibration) for weight in weights) < 0.8 * before


def test_the_best_of_the_grid_is_chosen() -> None:
    weight, calibration = heavy_tailed((64, 96)), statistics_of(uneven_inputs(300, 96))
    factors = Awq().scales("x", [weight], [INT4], calibration)
    inputs = np.sqrt(calibration.mean_square.astype(np.float64))
    magnitudes = np.sqrt(np.square(weight.astype(np.float64)).sum(axis=0))
    errors = {}
    for a in (0.0, 0.15, 0.3, 0.45, 0.6):
        for b in (0.0, 0.3, 0.6):
            raw = inputs**a / magnitudes**b
            candidate = (raw / np.sqrt(raw.max() * raw.min())).astype(np.float32)
            errors[a, b] = folded_error(weight, candidate, calibration)
    assert folded_error(weight, factors, calibration) == pytest.approx(min(errors.values()), rel=1e-3)


def test_tied_channels_share_a_factor() -> None:
    weight, calibration = heavy_tailed((40, 128)), statistics_of(uneven_inputs(500, 128))
    ties = np.arange(128, dtype=np.int64) % 16
    factors = Awq().scales("x", [weight], [INT4], calibration, ties=ties)
    assert factors.max() > factors.min()
    for tie in range(16):
        assert len(set(factors[ties == tie].tolist())) == 1
    assert factors[0] == factors.max()


def test_where_factors_do_not_help_there_are_none() -> None:
    identity = np.eye(64, dtype=np.float32)
    even = Calibration(np.ones(64, np.float32), identity, None, 100)
    weight = np.where(np.random.default_rng(0).random((32, 64)) < 0.5, -0.5, 0.5).astype(np.float32)
    assert (Awq().scales("x", [weight], [INT4], even) == 1).all()
    zeros = np.zeros(64, np.float32)
    for unseen in (Calibration(zeros, None, None, 0), Calibration(zeros, zeros[:, None] * zeros, None, 4)):
        assert (Awq().scales("x", [weight], [INT4], unseen) == 1).all()
    assert (Awq().scales("x", [], [], even) == 1).all()
    assert (Awq().scales("x", [weight * 0], [INT4], even) == 1).all()


def test_dead_channels_keep_factors_finite() -> None:
    inputs = uneven_inputs(300, 128)
    inputs[:, 5:60] = 0
    weight = heavy_tailed((40, 128))
    weight[:, 70:80] = 0
    factors = Awq().scales("x", [weight], [INT4], statistics_of(inputs))
    assert np.isfinite(factors).all()
    assert factors.min() >= 1 / 64.1 and factors.max() <= 64.1


def test_threads_do_not_matter() -> None:
    weights = [heavy_tailed((300, 160))]
    calibration = statistics_of(uneven_inputs(500, 160))
    outcomes = [Awq().scales("x", weights, [INT4], calibration, threads=n).tobytes() for n in (1, 2, 6)]
    assert len(set(outcomes)) == 1


def test_output_error_is_the_mean_over_tokens() -> None:
    errors, inputs = heavy_tailed((70, 50)), uneven_inputs(400, 50)
    calibration = statistics_of(inputs)
    expected = np.square(inputs.astype(np.float64) @ errors.T.astype(np.float64)).sum(axis=1).mean()
    assert output_error(errors, calibration) == pytest.approx(expected, rel=1e-4)
    diagonal = (np.square(errors.astype(np.float64)) * calibration.mean_square).sum()
    assert output_error(errors, replace(calibration, gram=None)) == pytest.approx(diagonal, rel=1e-5)


def test_parts_that_do_not_fit_are_named() -> None:
    weight, calibration = heavy_tailed((40, 128)), statistics_of(uneven_inputs(50, 128))
    with pytest.raises(QuantizationError, match=r"h: a weight \[40, 100\] does not read 128 input channels"):
        Awq().scales("h", [weight[:, :100]], [INT4], calibration)
    with pytest.raises(QuantizationError, match="1 weights, but 2 schemes"):
        Awq().scales("h", [weight], [INT4, INT4], calibration)
    with pytest.raises(QuantizationError, match="ties"):
        Awq().scales("h", [weight], [INT4], calibration, ties=np.zeros(3, np.int64))
    with pytest.raises(QuantizationError, match="finite"):
        Awq().scales("h", [weight], [INT4], replace(calibration, mean_square=calibration.mean_square * np.nan))

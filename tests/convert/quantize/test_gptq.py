from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from inferencex.convert.quantize import TensorScheme, quantize_weight
from inferencex.convert.quantize.base import Calibration, method_named
from inferencex.convert.quantize.gptq import Gptq
from inferencex.formats.errors import QuantizationError
from inferencex.formats.packing import PER_CHANNEL
from tests.convert.quantize.gptq_reference import gptq, output_error
from tests.convert.quantize.inputs import correlated_inputs, heavy_tailed, statistics_of
from tests.convert.quantize.reference import integer_range

INT4 = TensorScheme("int4", 64, False)
SCHEMES = [
    TensorScheme(kind, group_size, symmetric)
    for kind in ("int3", "int4", "int5", "int6", "int8")
    for group_size in (PER_CHANNEL, 1, 24, 64, 1000)
    for symmetric in (True, False)
]


def gram_of(calibration: Calibration) -> NDArray[np.float32]:
    assert calibration.gram is not None
    return calibration.gram


def limits_of(scheme: TensorScheme) -> tuple[int, int]:
    if scheme.bits == 3 and not scheme.symmetric:
        return 0, 7
    return integer_range(scheme.bits, scheme.symmetric)


def spread(values: NDArray[Any], group_size: int, channels: int) -> NDArray[np.float64]:
    return np.repeat(values.astype(np.float64), group_size, axis=1)[:, :channels]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_without_descent_it_is_the_paper_with_searched_ranges(scheme: TensorScheme) -> None:
    weight, calibration = heavy_tailed((20, 90)), statistics_of(correlated_inputs(400, 90))
    gram = gram_of(calibration)
    tensor = Gptq(damping=0.02, sweeps=0).quantize("w", weight, scheme, calibration).tensor
    ranges = quantize_weight("w", weight, scheme, importance=np.sqrt(calibration.mean_square)).tensor
    assert (tensor.bits, tensor.group_size, tensor.symmetric) == (scheme.bits, scheme.group_size, scheme.symmetric)
    assert tensor.scales.tobytes() == ranges.scales.tobytes()
    zeros = ranges.zero_point_integers()
    scales = ranges.scales.astype(np.float32).reshape(20, -1)
    zero_points = np.zeros_like(scales) if zeros is None else zeros.astype(np.float32).reshape(20, -1)
    group_size = 90 if scheme.group_size == PER_CHANNEL else min(scheme.group_size, 90)
    order = np.argsort(-gram.diagonal(), kind="stable")
    ridge = 0.02 * float(gram.diagonal().mean())
    integers, dequantized = gptq(weight, gram, order, scales, zero_points, group_size, limits_of(scheme), ridge)
    assert (tensor.integers() == integers).all(axis=1).mean() >= 0.8
    ours = output_error(weight, tensor.dequantize(), gram)
    assert ours == pytest.approx(output_error(weight, dequantized, gram), rel=0.02)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_outputs_are_closer_than_rounded_to_nearest(scheme: TensorScheme) -> None:
    weight, calibration = heavy_tailed((33, 172)), statistics_of(correlated_inputs(700, 172))
    fresh = gram_of(statistics_of(correlated_inputs(700, 172, seed=1)))
    result = method_named("gptq").quantize("w", weight, scheme, calibration)
    nearest = quantize_weight("w", weight, scheme, importance=calibration.mean_square)
    plain = Gptq(sweeps=0).quantize("w", weight, scheme, calibration)
    found = output_error(weight, result.tensor.dequantize(), fresh)
    if scheme.group_size != 1:  # groups of one have scales that fit, and errors of float16 only
        assert found < 0.8 * output_error(weight, nearest.tensor.dequantize(), fresh)
        assert found < output_error(weight, plain.tensor.dequantize(), fresh)
    assert result.remark == ""
    exact = np.square(weight.astype(np.float64) - result.tensor.dequantize()).sum()
    assert result.squared_error == pytest.approx(exact, rel=1e-4, abs=1e-9)
    assert result.squared_norm == pytest.approx(np.square(weight.astype(np.float64)).sum(), rel=1e-5)


@pytest.mark.parametrize("scheme", [INT4, TensorScheme("int8", PER_CHANNEL, True)], ids=str)
def test_threads_do_not_matter(scheme: TensorScheme) -> None:
    weight, calibration = heavy_tailed((200, 130)), statistics_of(correlated_inputs(300, 130))
    results = [method_named("gptq").quantize("w", weight, scheme, calibration, threads=n) for n in (1, 2, 5)]
    for result in results[1:]:
        assert result.tensor.values.tobytes() == results[0].tensor.values.tobytes()
        assert result.tensor.scales.tobytes() == results[0].tensor.scales.tobytes()
        assert result.squared_error == results[0].squared_error


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
def test_short_floats_are_quantized_as_the_floats_they_are(kind: type) -> None:
    weight, calibration = heavy_tailed((12, 70)).astype(kind), statistics_of(correlated_inputs(100, 70))
    short = method_named("gptq").quantize("w", weight, INT4, calibration)
    long = method_named("gptq").quantize("w", weight.astype(np.float32), INT4, calibration)
    assert short.tensor.values.tobytes() == long.tensor.values.tobytes()


def test_dead_channels_neither_give_nor_take() -> None:
    inputs = correlated_inputs(300, 128)
    inputs[:, ::5] = 0.0
    weight, calibration = heavy_tailed((16, 128)), statistics_of(inputs)
    result = method_named("gptq").quantize("w", weight, TensorScheme("int4", 16, False), calibration)
    step = spread(result.tensor.scales, 16, 128)
    dead = np.arange(0, 128, 5)
    peaks = np.abs(weight).max()
    assert (np.abs(result.tensor.dequantize() - weight)[:, dead] <= 0.5 * step[:, dead] + 0.4 * peaks).all()
    other = weight.copy()
    other[:, dead] *= 0.9
    again = method_named("gptq").quantize("w", other, TensorScheme("int4", PER_CHANNEL, False), calibration)
    assert np.isfinite(again.tensor.dequantize()).all()


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_singular_gram_matrices_are_damped(tokens: int) -> None:
    weight, calibration = heavy_tailed((10, 96)), statistics_of(correlated_inputs(tokens, 96))
    result = method_named("gptq").quantize("w", weight, INT4, calibration)
    nearest = quantize_weight("w", weight, INT4, importance=calibration.mean_square)
    gram = gram_of(calibration)
    assert output_error(weight, result.tensor.dequantize(), gram) < output_error(
        weight, nearest.tensor.dequantize(), gram
    )


def test_damping_is_raised_until_the_matrix_is_positive() -> None:
    weight, calibration = heavy_tailed((10, 96)), statistics_of(correlated_inputs(30, 96))
    gram = gram_of(calibration).copy()
    noise = np.random.default_rng(0).normal(size=gram.shape).astype(np.float32)
    np.fill_diagonal(noise, 0)
    gram += (noise + noise.T) * np.float32(0.004 * gram.diagonal().mean())
    result = method_named("gptq").quantize("w", weight, INT4, replace(calibration, gram=gram))
    assert "damping raised to 0.3" in result.remark
    gram[0, 1] = gram[1, 0] = 1000 * gram.max()
    with pytest.raises(QuantizationError, match="w: the Gram matrix of its inputs is not positive"):
        method_named("gptq").quantize("w", weight, INT4, replace(calibration, gram=gram))


def test_inputs_without_tokens_are_rounded_to_nearest_and_said_so() -> None:
    weight = heavy_tailed((8, 64))
    nearest = quantize_weight("w", weight, INT4)
    zeros = np.zeros(64, np.float32)
    for calibration in (
        Calibration(zeros, None, None, 0),
        Calibration(zeros, np.zeros((64, 64), np.float32), zeros, 5),
    ):
        result = method_named("gptq").quantize("w", weight, INT4, calibration)
        assert result.tensor.values.tobytes() == nearest.tensor.values.tobytes()
        assert result.tensor.scales.tobytes() == nearest.tensor.scales.tobytes()
        assert "rounded to nearest" in result.remark


def test_stacks_of_experts_are_quantized_one_by_one() -> None:
    scheme = TensorScheme("int4", 32, False)
    weight = heavy_tailed((3, 6, 80))
    each = [statistics_of(correlated_inputs(200, 80, seed)) for seed in (1, 2)]
    empty = np.zeros((80, 80), np.float32)
    stacked = Calibration(
        np.stack([each[0].mean_square, np.zeros(80, np.float32), each[1].mean_square]),
        np.stack([gram_of(each[0]), empty, gram_of(each[1])]),
        None,
        400,
    )
    result = method_named("gptq").quantize("w", weight, scheme, stacked)
    assert result.remark.endswith("reached it: 1")
    found = result.tensor.dequantize()
    for expert, calibration in ((0, each[0]), (2, each[1])):
        single = method_named("gptq").quantize("w", weight[expert], scheme, calibration)
        np.testing.assert_array_equal(found[expert], single.tensor.dequantize())
    np.testing.assert_array_equal(found[1], quantize_weight("w", weight[1], scheme).tensor.dequantize())
    exact = np.square(weight.astype(np.float64) - found).sum()
    assert result.squared_error == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("factor", [1e-25, 1e-4, 1e7])
def test_scales_beyond_float16(factor: float) -> None:
    weight, calibration = heavy_tailed((8, 128)), statistics_of(correlated_inputs(300, 128))
    result = method_named("gptq").quantize("w", weight * np.float32(factor), INT4, calibration)
    assert result.tensor.scales.dtype == np.float32
    plain = method_named("gptq").quantize("w", weight, INT4, calibration)
    np.testing.assert_allclose(result.relative_error, plain.relative_error, rtol=0.05)


def test_what_cannot_be_quantized_is_named() -> None:
    weight, calibration = heavy_tailed((4, 64)), statistics_of(correlated_inputs(100, 64))
    method = method_named("gptq")
    with pytest.raises(QuantizationError, match="needs calibration"):
        method.quantize("layer.w", weight, INT4)
    with pytest.raises(
        QuantizationError, match=r"layer\.w: a Gram matrix of its 64 input channels is needed, found none"
    ):
        method.quantize("layer.w", weight, INT4, replace(calibration, gram=None))
    bad = gram_of(calibration).copy()
    bad[3, 4] = np.inf
    with pytest.raises(QuantizationError, match="not finite"):
        method.quantize("layer.w", weight, INT4, replace(calibration, gram=bad))
    with pytest.raises(QuantizationError, match="needs statistics of each matrix"):
        method.quantize("layer.w", weight[None], INT4, calibration)
    broken = weight.copy()
    broken[1, 2] = np.nan
    with pytest.raises(QuantizationError, match=r"the weight at \[1, 2\] is nan"):
        method.quantize("layer.w", broken, INT4, calibration)

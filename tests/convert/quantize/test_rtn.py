from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inferencex.convert.native import _quantize
from inferencex.convert.quantize import Calibration, TensorScheme, method_named, quantize_weight
from inferencex.formats.errors import QuantizationError
from inferencex.formats.packing import PER_CHANNEL
from tests.convert.quantize.reference import fit_error, full_range, grid_error, groups_of, integer_range, own_importance

SCHEMES = [
    TensorScheme(kind, group_size, symmetric)
    for kind in ("int3", "int4", "int5", "int6", "int8")
    for group_size in (PER_CHANNEL, 16, 64)
    for symmetric in (True, False)
]


def heavy_tailed(shape: tuple[int, ...], seed: int = 0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_t(5, shape) * 0.05).astype(np.float32)


def exact_error(weight: NDArray[Any], dequantized: NDArray[np.float32]) -> float:
    return float(((weight.astype(np.float64) - dequantized) ** 2).sum())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_without_search_it_is_the_full_range(scheme: TensorScheme) -> None:
    weight = heavy_tailed((6, 100))
    tensor = quantize_weight("w", weight, scheme, search=False).tensor
    limits = integer_range(scheme.bits, scheme.symmetric)
    scales = tensor.scales.reshape(6, -1)
    zero_points = tensor.zero_point_integers()
    group_size = 100 if scheme.group_size == PER_CHANNEL else scheme.group_size
    for index, channels in groups_of(weight, group_size):
        scale, zero = full_range(weight[index[0], channels].astype(np.float64), limits, scheme.symmetric)
        assert float(scales[index]) == pytest.approx(scale, rel=1e-3)
        if zero_points is not None:
            assert zero_points.reshape(6, -1)[index] == zero
        levels = np.rint(weight[index[0], channels] / scales[index].astype(np.float32)) + zero
        np.testing.assert_allclose(tensor.integers()[index[0], channels], np.clip(levels, *limits), atol=1)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_search_is_as_good_as_a_finer_grid(scheme: TensorScheme, weighted: bool) -> None:
    weight = heavy_tailed((8, 100), seed=3)
    importance = np.random.default_rng(4).exponential(1.0, 100).astype(np.float32) if weighted else None
    weights64 = weight.astype(np.float64)
    limits = integer_range(scheme.bits, scheme.symmetric)
    found = quantize_weight("w", weight, scheme, importance=importance).tensor
    difference = (weights64 - found.dequantize()) ** 2
    group_size = 100 if scheme.group_size == PER_CHANNEL else scheme.group_size
    total_found, total_grid = 0.0, 0.0
    for index, channels in groups_of(weight, group_size):
        group = weights64[index[0], channels]
        h = own_importance(group) if importance is None else importance[channels].astype(np.float64)
        error = float((h * difference[index[0], channels]).sum())
        scale, zero = full_range(group, limits, scheme.symmetric)
        assert error <= fit_error(group, scale, zero, limits, h) * (1 + 1e-5)
        total_found += error
        total_grid += grid_error(group, limits, scheme.symmetric, h)
    assert total_found <= total_grid * 1.02


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_reported_error_is_the_error(scheme: TensorScheme) -> None:
    weight = heavy_tailed((9, 77))
    result = quantize_weight("w", weight, scheme, importance=np.arange(77, dtype=np.float32))
    assert result.squared_error == pytest.approx(exact_error(weight, result.tensor.dequantize()), rel=1e-4)
    assert result.squared_norm == pytest.approx(float((weight.astype(np.float64) ** 2).sum()), rel=1e-5)
    assert result.relative_error == pytest.approx(math.sqrt(result.squared_error / result.squared_norm))


@pytest.mark.parametrize("shape", [(1, 1), (7, 1), (5, 13), (33, 172), (3, 5, 9), (2, 3, 64)])
@pytest.mark.parametrize("group_size", [1, 4, 64, 1000])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_every_shape_comes_back(shape: tuple[int, ...], group_size: int, bits: int, symmetric: bool) -> None:
    weight = heavy_tailed(shape)
    result = quantize_weight("w", weight, TensorScheme(f"int{bits}", group_size, symmetric))
    tensor = result.tensor
    assert tensor.shape == shape
    assert tensor.scale_shape == (*shape[:-1], math.ceil(shape[-1] / group_size))
    # No weight is further from its integer than the coarsest range allows.
    steps = tensor.scales.astype(np.float32).repeat(group_size, axis=-1)[..., : shape[-1]]
    clipped_most = 0.4 if bits == 4 else 0.15
    peak = np.abs(weight).max()
    assert (np.abs(tensor.dequantize() - weight) <= steps * 0.5 + clipped_most * peak).all()
    if group_size == 1:
        np.testing.assert_allclose(tensor.dequantize(), weight, rtol=2e-3)


@pytest.mark.parametrize("shape", [(35, 77), (3, 11, 31), (64, 64)])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_equal_bits_on_any_number_of_threads_and_any_instruction_set(
    shape: tuple[int, ...], scheme: TensorScheme
) -> None:
    if len(shape) == 3 and scheme.group_size == PER_CHANNEL:
        scheme = TensorScheme(scheme.type, shape[-1], scheme.symmetric)
    weight = heavy_tailed(shape, seed=9)
    rows, channels = weight.size // shape[-1], shape[-1]
    group_size = channels if scheme.group_size == PER_CHANNEL else scheme.group_size
    groups = math.ceil(channels / group_size)
    importance = np.random.default_rng(2).exponential(1.0, (1, channels)).astype(np.float32)
    outcomes = []
    settings_tried = [(1, ""), (2, ""), (5, ""), *((1, name) for name in _quantize.instruction_sets())]
    bits = 4 if scheme.bits == 4 else 8  # of an integer's place
    for threads, instruction_set in settings_tried:
        values = np.zeros((weight.size * bits + 7) // 8, np.uint8)
        scales = np.zeros((rows, groups), np.float32)
        zeros = np.zeros(0 if scheme.symmetric else (rows * groups * bits + 7) // 8, np.uint8)
        errors, norms = np.zeros(rows), np.zeros(rows)
        _quantize.quantize(
            weight.reshape(rows, channels), "float32", group_size, scheme.bits, scheme.symmetric, True, True,
            importance, values, scales, zeros, errors, norms, threads, instruction_set,
        )  # fmt: skip
        outcomes.append([array.tobytes() for array in (values, scales, zeros, errors, norms)])
    assert all(outcome == outcomes[0] for outcome in outcomes)


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("group_size", [PER_CHANNEL, 64])
def test_short_floats_are_read_exactly(kind: type, group_size: int) -> None:
    weight = heavy_tailed((12, 100)).astype(kind)
    weight[0, 0] = np.array(6e-8, dtype=kind)
    scheme = TensorScheme("int4", group_size, False)
    short, long = quantize_weight("w", weight, scheme), quantize_weight("w", weight.astype(np.float32), scheme)
    assert short.tensor.values.tobytes() == long.tensor.values.tobytes()
    assert short.tensor.scales.tobytes() == long.tensor.scales.tobytes()
    assert short.squared_error == long.squared_error


def test_views_are_quantized_like_copies() -> None:
    weight = heavy_tailed((64, 48))
    scheme = TensorScheme("int4", 16, True)
    transposed = quantize_weight("w", weight.T, scheme)
    copied = quantize_weight("w", weight.T.copy(), scheme)
    assert transposed.tensor.values.tobytes() == copied.tensor.values.tobytes()
    unaligned = np.frombuffer(b"x" + weight.tobytes(), dtype=np.uint8)[1:].view(np.float32).reshape(64, 48)
    assert not unaligned.flags.aligned
    assert (
        quantize_weight("w", unaligned, scheme).tensor.values.tobytes()
        == quantize_weight("w", weight, scheme).tensor.values.tobytes()
    )


def test_memory_mapped_weights_are_read_in_place(tmp_path: Path) -> None:
    weight = heavy_tailed((16, 64)).astype(np.float16)
    weight.tofile(tmp_path / "weights")
    mapped = np.memmap(tmp_path / "weights", dtype=np.float16, mode="r", shape=(16, 64))
    scheme = TensorScheme("int4", 64, False)
    assert (
        quantize_weight("w", mapped, scheme).tensor.values.tobytes()
        == quantize_weight("w", weight, scheme).tensor.values.tobytes()
    )


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_zeros_stay_zeros(scheme: TensorScheme) -> None:
    weight = heavy_tailed((4, 128))
    weight[1] = 0.0
    weight[2, :64] = 0.0
    tensor = quantize_weight("w", weight, scheme).tensor
    dequantized = tensor.dequantize()
    assert np.isfinite(tensor.scales).all()
    assert (dequantized[1] == 0).all()
    if scheme.group_size != PER_CHANNEL:
        assert (dequantized[2, :64] == 0).all()
    assert (quantize_weight("w", np.zeros((2, 5), np.float32), scheme).tensor.dequantize() == 0).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_one_sided_and_constant_groups(symmetric: bool) -> None:
    scheme = TensorScheme("int4", 16, symmetric)
    for sign in (1, -1):
        positive = (np.abs(heavy_tailed((8, 32))) + 0.01).astype(np.float32) * np.float32(sign)
        result = quantize_weight("w", positive, scheme)
        assert result.relative_error < 0.15
        constant = np.full((2, 16), 0.3 * sign, dtype=np.float32)
        np.testing.assert_allclose(quantize_weight("w", constant, scheme).tensor.dequantize(), constant, rtol=1e-3)


@pytest.mark.parametrize(
    ("factor", "expected"), [(1.0, np.float16), (1e-4, np.float32), (1e7, np.float32), (1e-25, np.float32)]
)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_scales_are_float32_only_where_float16_does_not_reach(
    scheme: TensorScheme, factor: float, expected: type
) -> None:
    weight = np.random.default_rng(0).uniform(-1, 1, (8, 128)).astype(np.float32)
    tensor = quantize_weight("w", weight * np.float32(factor), scheme).tensor
    assert tensor.scales.dtype == expected
    magnitudes = np.abs(tensor.scales.astype(np.float64))
    if expected is np.float16:
        assert magnitudes.min() >= 2.0**-14
    reference = quantize_weight("w", weight, scheme)
    error = exact_error(weight, tensor.dequantize() / np.float32(factor))
    assert error <= reference.squared_error * 1.02


def test_one_tiny_group_makes_all_scales_float32() -> None:
    weight = heavy_tailed((4, 128))
    weight[3, 64:] *= np.float32(1e-6)
    tensor = quantize_weight("w", weight, TensorScheme("int4", 64, False)).tensor
    assert tensor.scales.dtype == np.float32
    assert np.abs(tensor.dequantize()[3, 64:] - weight[3, 64:]).max() < 1e-7


@pytest.mark.parametrize("value", [3e38, 1e-38, 1e-45])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_ends_of_float32(scheme: TensorScheme, value: float) -> None:
    weight = np.full((2, 32), value, dtype=np.float32)
    weight[:, ::2] *= -1
    result = quantize_weight("w", weight, scheme)
    assert np.isfinite(result.tensor.scales).all()
    assert np.isfinite(result.squared_error)
    if value > 1:
        assert result.relative_error < 0.2


@pytest.mark.parametrize("kind", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_named(kind: type, bad: float) -> None:
    weight = heavy_tailed((3, 20, 7)).astype(kind)
    weight[1, 4, 6] = bad
    with pytest.raises(QuantizationError, match=r"model\.layers\.3: the weight at \[1, 4, 6\] is (nan|inf|-inf)"):
        quantize_weight("model.layers.3", weight, TensorScheme("int4", 4, True))


@pytest.mark.parametrize(
    ("weight", "importance", "message"),
    [
        (np.zeros((3, 4)), None, "weights of type float64"),
        (np.zeros(4, np.float32), None, "cannot be quantized"),
        (np.zeros((0, 4), np.float32), None, "cannot be quantized"),
        (np.zeros((2, 4), np.float32), np.ones(3, np.float32), r"importance of shape \[3\]"),
        (np.zeros((2, 4), np.float32), np.full(4, np.nan, np.float32), "finite and not negative"),
        (np.zeros((2, 4), np.float32), np.full(4, -1, np.float32), "finite and not negative"),
    ],
)
def test_what_cannot_be_quantized(weight: NDArray[Any], importance: NDArray[np.float32] | None, message: str) -> None:
    with pytest.raises(QuantizationError, match=message):
        quantize_weight("w", weight, TensorScheme("int4", 4, True), importance=importance)


def test_per_channel_is_for_matrices() -> None:
    with pytest.raises(QuantizationError, match="only matrices"):
        quantize_weight("w", np.zeros((2, 2, 4), np.float32), TensorScheme("int8", PER_CHANNEL, True))


def test_importance_moves_the_error_to_where_it_matters_less() -> None:
    weight = heavy_tailed((64, 64))
    importance = np.where(np.arange(64) < 8, 100.0, 1.0).astype(np.float32)
    scheme = TensorScheme("int4", 64, False)
    plain, weighted = (
        quantize_weight("w", weight, scheme, importance=given).tensor.dequantize() for given in (None, importance)
    )
    important = np.s_[:, :8]
    assert exact_error(weight[important], weighted[important]) < 0.9 * exact_error(weight[important], plain[important])


def test_experts_have_their_own_importance() -> None:
    weight = heavy_tailed((3, 10, 32))
    importance = np.random.default_rng(1).exponential(1.0, (3, 32)).astype(np.float32)
    importance[2] = 0.0
    scheme = TensorScheme("int4", 16, False)
    together = quantize_weight("w", weight, scheme, importance=importance).tensor.dequantize()
    for expert in range(3):
        given = None if expert == 2 else importance[expert]
        alone = quantize_weight("w", weight[expert], scheme, importance=given).tensor.dequantize()
        np.testing.assert_array_equal(together[expert], alone)


def test_the_method_uses_the_statistics_it_is_given() -> None:
    weight = heavy_tailed((8, 64))
    scheme = TensorScheme("int4", 64, False)
    mean_square = np.random.default_rng(1).exponential(1.0, 64).astype(np.float32)
    by_method = method_named("rtn").quantize("w", weight, scheme, Calibration(mean_square))
    direct = quantize_weight("w", weight, scheme, importance=mean_square)
    assert by_method.tensor.values.tobytes() == direct.tensor.values.tobytes()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    channels=st.integers(1, 70),
    group_size=st.integers(1, 80),
    symmetric=st.booleans(),
    bits=st.sampled_from([3, 4, 5, 6, 8]),
    exponent=st.integers(-40, 30),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_matrix(
    rows: int, channels: int, group_size: int, symmetric: bool, bits: int, exponent: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    weight = (rng.standard_normal((rows, channels)) * 10.0**exponent).astype(np.float32)
    weight[rng.random((rows, channels)) < 0.2] = 0
    scheme = TensorScheme(f"int{bits}", group_size, symmetric)
    searched = quantize_weight("w", weight, scheme)
    full = quantize_weight("w", weight, scheme, search=False)
    # In float64 as a multiple of the largest weight, so that squares of tiny weights do not vanish.
    unit = max(float(np.abs(weight).max()), 1e-30)
    dequantized = [result.tensor.dequantize().astype(np.float64) / unit for result in (searched, full)]
    for index, where in groups_of(weight, group_size):
        group = weight[index[0], where].astype(np.float64) / unit
        found, plain = (
            float((own_importance(group) * (group - result[index[0], where]) ** 2).sum()) for result in dequantized
        )
        assert found <= plain * (1 + 1e-4) + 1e-30
    assert np.isfinite(searched.tensor.scales).all()
    assert (searched.tensor.scales > 0).all()
    low, high = integer_range(bits, symmetric)
    integers = searched.tensor.integers()
    assert integers.shape == (rows, channels) and integers.min() >= low and integers.max() <= high

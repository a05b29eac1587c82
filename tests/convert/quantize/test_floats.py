"""Weights as floats of 8 and 4 bits, against numpy's own rounding and exhaustive searches."""

from __future__ import annotations

import math
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
from tests.convert.quantize.reference import groups_of, own_importance
from tests.convert.quantize.test_rtn import exact_error, heavy_tailed

FP8, FP8_GROUPS = TensorScheme("fp8", PER_CHANNEL, True), TensorScheme("fp8", 24, True)
NVFP4, MXFP4 = TensorScheme("nvfp4", 16, True), TensorScheme("mxfp4", 32, True)
SCHEMES = [FP8, FP8_GROUPS, NVFP4, MXFP4]
NUMBERS = {"e4m3": ml_dtypes.float8_e4m3fn, "e2m1": ml_dtypes.float4_e2m1fn}
LARGEST = {"e4m3": 448.0, "e2m1": 6.0}


def _group_size(scheme: TensorScheme, channels: int) -> int:
    return channels if scheme.group_size == PER_CHANNEL else scheme.group_size


def _rounded(group: NDArray[np.float64], scale: float, number: str) -> NDArray[np.float64]:
    """Return what numbers of a format times `scale` make of a group."""
    levels = np.clip(group / scale, -LARGEST[number], LARGEST[number]).astype(NUMBERS[number]).astype(np.float64)
    return np.asarray(levels * scale)


def _scales_near(scheme: TensorScheme, largest: float, tensor_scale: float) -> list[float]:
    """Return every scale that a group could reasonably have, finely where they are many."""
    full = largest / LARGEST[scheme.number]
    if scheme.type == "mxfp4":
        return [2.0 ** (math.floor(math.log2(largest)) - 2 + i) for i in (-2, -1, 0, 1, 2)]
    if scheme.type == "nvfp4":
        codes = np.arange(1, 0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64) * tensor_scale
        return [float(scale) for scale in codes if 0.5 * full <= scale <= 2 * full]
    return [float(np.float16(full * 2 ** (i / 24))) for i in range(-10, 25)]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_search_is_as_good_as_an_exhaustive_one(scheme: TensorScheme, weighted: bool) -> None:
    weight = heavy_tailed((8, 100), seed=3)
    importance = np.random.default_rng(4).exponential(1.0, 100).astype(np.float32) if weighted else None
    tensor = quantize_weight("w", weight, scheme, importance=importance).tensor
    found_weights = tensor.dequantize().astype(np.float64)
    scales = tensor.float_scales().reshape(8, -1)
    tensor_scale = 1.0 if tensor.tensor_scale is None else float(tensor.tensor_scale)
    found, best = 0.0, 0.0
    for index, channels in groups_of(weight, _group_size(scheme, 100)):
        group = weight[index[0], channels].astype(np.float64)
        h = own_importance(group) if importance is None else importance[channels].astype(np.float64)

        def error(scale: float, group: Any = group, h: Any = h) -> float:
            return float((h * (group - _rounded(group, scale, scheme.number)) ** 2).sum())

        np.testing.assert_allclose(
            found_weights[index[0], channels], _rounded(group, float(scales[index]), scheme.number), rtol=1e-5
        )
        found += error(float(scales[index]))
        best += min(error(scale) for scale in _scales_near(scheme, float(np.abs(group).max()), tensor_scale))
    assert found <= best * 1.03


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_without_search_the_largest_weight_becomes_the_largest_number(scheme: TensorScheme) -> None:
    weight = heavy_tailed((6, 100))
    tensor = quantize_weight("w", weight, scheme, search=False).tensor
    scales = tensor.float_scales().reshape(6, -1)
    for index, channels in groups_of(weight, _group_size(scheme, 100)):
        largest = float(np.abs(weight[index[0], channels]).max())
        if scheme.type == "mxfp4":
            assert scales[index] == 2.0 ** (math.floor(math.log2(largest)) - 2)
        else:
            assert float(scales[index]) == pytest.approx(largest / LARGEST[scheme.number], rel=0.07)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_search_helps_and_reports_its_error(scheme: TensorScheme) -> None:
    weight = heavy_tailed((9, 333), seed=1)
    importance = np.ones(333, dtype=np.float32)
    searched = quantize_weight("w", weight, scheme, importance=importance)
    plain = quantize_weight("w", weight, scheme, importance=importance, search=False)
    assert searched.squared_error < plain.squared_error
    assert searched.squared_error == pytest.approx(exact_error(weight, searched.tensor.dequantize()), rel=1e-4)
    assert searched.squared_norm == pytest.approx(float((weight.astype(np.float64) ** 2).sum()), rel=1e-5)


@pytest.mark.parametrize("element", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_threads_and_instruction_sets_do_not_matter(scheme: TensorScheme, element: Any) -> None:
    weight = heavy_tailed((70, 333)).astype(element)
    one, many = (quantize_weight("w", weight, scheme, threads=threads).tensor for threads in (1, 5))
    assert one.values.tobytes() == many.values.tobytes() and one.scales.tobytes() == many.scales.tobytes()
    kind = {"fp8": "float16", "nvfp4": "e4m3", "mxfp4": "power_of_two"}[scheme.type]
    results = []
    data = weight.view(np.uint16) if element is not np.float32 else weight
    for name in _quantize.instruction_sets():
        group_size = _group_size(scheme, 333)
        values = np.zeros(one.values.nbytes, dtype=np.uint8)
        scales = np.empty((70, -(-333 // group_size)), dtype=np.float32)
        errors, norms = np.empty(70), np.empty(70)
        none = np.empty((0, 333), dtype=np.float32)
        _quantize.quantize_to_floats(
            data, np.dtype(element).name, group_size, scheme.number, kind, 2.0**-11, True,
            none, values, scales, errors, norms, 1, name,
        )  # fmt: skip
        results.append((values.tobytes(), scales.tobytes(), errors.tobytes(), norms.tobytes()))
    assert len(set(results)) == 1


@settings(max_examples=80, deadline=None)
@given(
    shape=st.one_of(
        st.tuples(st.integers(1, 6), st.integers(1, 70)),
        st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 40)),
    ),
    scheme=st.sampled_from(SCHEMES),
    exponent=st.integers(-25, 25),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_weight(shape: tuple[int, ...], scheme: TensorScheme, exponent: int, seed: int) -> None:
    """Of any shape, magnitude and share of zeros: no group is further off than numbers of its format must be."""
    if len(shape) == 3 and scheme.group_size == PER_CHANNEL:
        scheme = TensorScheme("fp8", shape[-1], True)
    rng = np.random.default_rng(seed)
    weight = (rng.standard_normal(shape) * 10.0**exponent).astype(np.float32)
    weight[rng.random(shape) < 0.2] = 0
    tensor = quantize_weight("w", weight, scheme).tensor
    assert tensor.shape == shape
    dequantized = tensor.dequantize().astype(np.float64).reshape(-1, shape[-1])
    assert np.isfinite(tensor.scales.astype(np.float32)).all()
    for index, channels in groups_of(weight.reshape(-1, shape[-1]), _group_size(scheme, shape[-1])):
        group = weight.reshape(-1, shape[-1])[index[0], channels].astype(np.float64)
        difference = np.abs(dequantized[index[0], channels] - group).max()
        largest = np.abs(weight).max() if scheme.type == "nvfp4" else np.abs(group).max()
        # A scale of NVFP4 is at least 2^-9 of the largest in the tensor, whose group has 448 of it.
        slack = np.abs(weight).max() * 2.0**-17 if scheme.type == "nvfp4" else 0.0
        assert difference <= 0.3 * min(largest, np.abs(group).max() + slack) + slack + 2.0**-99


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_weights_of_zeros(scheme: TensorScheme) -> None:
    tensor = quantize_weight("w", np.zeros((3, 50), np.float32), scheme).tensor
    assert not tensor.dequantize().any()
    assert np.isfinite(tensor.float_scales()).all() and (tensor.float_scales() > 0).all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_numbers_of_the_format_are_kept(scheme: TensorScheme) -> None:
    numbers = np.arange(256, dtype=np.uint8) if scheme.number == "e4m3" else np.arange(16, dtype=np.uint8)
    exact = numbers.view(NUMBERS[scheme.number]).astype(np.float32)
    exact = np.resize(exact[np.isfinite(exact)], (4, 480)) * np.float32(0.25)
    np.testing.assert_array_equal(quantize_weight("w", exact, scheme).tensor.dequantize(), exact)


def test_fp8_scales_that_float16_cannot_hold_are_float32() -> None:
    for factor, dtype in ((1.0, np.float16), (1e-6, np.float32), (1e9, np.float32)):
        tensor = quantize_weight("w", heavy_tailed((4, 64)) * np.float32(factor), FP8).tensor
        assert tensor.scales.dtype == dtype


def test_the_method_weighs_by_calibration() -> None:
    weight, importance = heavy_tailed((8, 96)), np.random.default_rng(0).exponential(1.0, 96).astype(np.float32)
    result = method_named("rtn").quantize("w", weight, FP8, Calibration(importance))
    expected = quantize_weight("w", weight, FP8, importance=importance)
    assert result.tensor.values.tobytes() == expected.tensor.values.tobytes()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_damaged_weights_are_refused(scheme: TensorScheme) -> None:
    weight = heavy_tailed((4, 64))
    weight[2, 3] = np.nan
    with pytest.raises(QuantizationError, match=r"layer: the weight at \[2, 3\] is nan"):
        quantize_weight("layer", weight, scheme)

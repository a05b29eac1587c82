"""Linears on float32 activations, compared with float64."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from inferencex.formats.dialect import reference
from inferencex.runtime.backends.cpu.native import _cpu
from tests.runtime.backends.cpu.operations import Argument, Typed, run_operation
from tests.runtime.backends.cpu.stored_weights import EPSILON, SPECS, Spec, StoredWeight, stored_weight

Floats = NDArray[np.float32]

ROWS = (1, 2, 3, 7, 8, 12, 13, 24, 33, 98)
SHAPES = ((1, 1), (33, 7), (70, 96), (64, 256), (100, 515))  # N, K
ISAS = _cpu.available_isas()


def random_rows(rng: np.random.Generator, rows: int, features: int) -> Floats:
    return rng.standard_normal((rows, features), dtype=np.float32)


def linear(
    x: Floats, weight: StoredWeight, bias: Argument = None, *, threads: int = 1, isa: str | None = None, **more: Any
) -> Floats:
    channels, features = weight.exact.shape
    y = np.full((len(x), channels // 2 if "activation" in more else channels), 7, dtype=np.float32)
    attributes = {"channels": channels, "features": features, **weight.attributes, **more}
    run_operation("FloatLinear", [x, *weight.operands, bias], [y], attributes, threads=threads, isa=isa)
    return y


def assert_rounded(y: Floats, x: Floats, weight: StoredWeight, bias: NDArray[Any] | None = None) -> None:
    """Differences to float64 are a few roundings of the terms that were added."""
    exact = x.astype(np.float64) @ weight.exact.T
    terms = np.abs(x).astype(np.float64) @ np.abs(weight.exact).T
    if bias is not None:
        exact, terms = exact + bias, terms + np.abs(bias)
    assert np.all(np.abs(y - exact) <= 4 * EPSILON * terms)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_equals_float64(spec: Spec, isa: str) -> None:
    rng = np.random.default_rng(1)
    for channels, features in SHAPES:
        weight = stored_weight(rng, (channels, features), spec)
        x = random_rows(rng, max(ROWS), features)
        for rows in ROWS:
            assert_rounded(linear(x[:rows], weight, isa=isa), x[:rows], weight)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_row_does_not_depend_on_the_others(spec: Spec, isa: str) -> None:
    rng = np.random.default_rng(2)
    weight = stored_weight(rng, (200, 515), spec)
    bias = rng.standard_normal(200, dtype=np.float32)
    x = random_rows(rng, 205, 515)
    whole = linear(x, weight, bias, isa=isa)
    assert np.array_equal(linear(x, weight, bias, threads=3, isa=isa), whole)
    assert np.array_equal(linear(x[::-1].copy(), weight, bias, threads=2, isa=isa)[::-1], whole)
    for first, rows in ((0, 1), (204, 1), (7, 2), (3, 4), (9, 7), (50, 12), (60, 13), (100, 25), (5, 100)):
        part = x[first : first + rows]
        for threads in (1, 2):
            assert np.array_equal(linear(part, weight, bias, threads=threads, isa=isa), whole[first : first + rows])


def test_many_rows() -> None:
    rng = np.random.default_rng(3)
    weight = stored_weight(rng, (300, 260), Spec("bf16"))
    x = random_rows(rng, 512, 260)
    assert_rounded(linear(x, weight, threads=2), x, weight)


def test_group_longer_than_the_features() -> None:
    rng = np.random.default_rng(4)
    per_channel = stored_weight(rng, (40, 50), Spec("int8"))
    x = random_rows(rng, 3, 50)
    assert np.array_equal(linear(x, per_channel, group=64), linear(x, per_channel))


def test_scales_of_one_dimension() -> None:
    rng = np.random.default_rng(5)
    weight = stored_weight(rng, (40, 50), Spec("int8"))
    x = random_rows(rng, 3, 50)
    values, scales, _ = weight.operands
    assert isinstance(scales, np.ndarray)
    flat = StoredWeight([values, scales.reshape(-1), None], weight.attributes, weight.exact)
    assert np.array_equal(linear(x, flat), linear(x, weight))


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_strided_rows(rows: int) -> None:
    rng = np.random.default_rng(6)
    weight = stored_weight(rng, (50, 60), Spec("bf16"))
    wide = random_rows(rng, 2 * rows, 100)
    x = wide[::2, 17:77]
    wide_y = np.full((2 * rows, 90), 7, dtype=np.float32)
    attributes = {"channels": 50, "features": 60, **weight.attributes}
    run_operation("FloatLinear", [x, *weight.operands], [wide_y[::2, 5:55]], attributes, threads=2)
    assert np.array_equal(wide_y[::2, 5:55], linear(x.copy(), weight))
    wide_y[::2, 5:55] = 7
    assert np.all(wide_y == 7)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("rows", [1, 9, 40])
def test_bias(rows: int, dtype: str) -> None:
    rng = np.random.default_rng(7)
    weight = stored_weight(rng, (45, 64), Spec("int4", group=32))
    types = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
    bias = (rng.standard_normal(45) * 8).astype(types[dtype])
    x = random_rows(rng, rows, 64)
    y = linear(x, weight, bias.view(np.uint16) if dtype == "bf16" else bias)
    assert_rounded(y, x, weight, bias.astype(np.float64))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layout", ["concat", "interleaved"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_clamped"])
def test_gate(activation: str, layout: str, isa: str) -> None:
    rng = np.random.default_rng(8)
    gate = {"activation": activation, "layout": layout, "alpha": 1.702, "limit": 7.0}
    for rows, width, spec in itertools.product((1, 5, 40), (1, 32, 77), (Spec("bf16"), Spec("int4", group=32))):
        weight = stored_weight(rng, (2 * width, 64), spec)
        bias = rng.standard_normal(2 * width, dtype=np.float32)
        x = random_rows(rng, rows, 64)
        inner = (x.astype(np.float64) @ weight.exact.T + bias).astype(np.float32)
        expected = reference._gate(inner, **gate)
        found = linear(x, weight, bias, threads=2, isa=isa, **gate)
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-4)


@pytest.mark.parametrize("isa", ISAS)
def test_every_f8_number(isa: str) -> None:
    bits = np.arange(256, dtype=np.uint8)
    weight = StoredWeight(
        [Typed(bits.reshape(256, 1), "f8e4m3"), None, None],
        {"format": "f8e4m3"},
        bits.view(ml_dtypes.float8_e4m3fn).astype(np.float64).reshape(256, 1),
    )
    for rows in (1, 40):
        y = linear(np.ones((rows, 1), dtype=np.float32), weight, isa=isa)
        assert np.array_equal(y, np.tile(weight.exact.T, (rows, 1)), equal_nan=True)


@pytest.mark.parametrize("isa", ISAS)
def test_every_f16_number(isa: str) -> None:
    numbers = np.arange(65536, dtype=np.uint16).view(np.float16).reshape(-1, 1)
    weight = StoredWeight([numbers, None, None], {"format": "f16"}, numbers.astype(np.float64))
    y = linear(np.ones((1, 1), dtype=np.float32), weight, isa=isa)
    assert np.array_equal(y, numbers.astype(np.float32).T, equal_nan=True)


def hostile() -> dict[str, tuple[dict[int, Argument], dict[str, Any], str]]:
    """Inputs to replace in a good blueprint, attributes to replace, and part of the message."""
    x = np.zeros((3, 64), dtype=np.float32)
    return {
        "x has other features": ({0: x[:, :63].copy()}, {}, "x has size 63"),
        "x is float16": ({0: x.astype(np.float16)}, {}, "x has the wrong element type"),
        "x is a vector": ({0: x[0]}, {}, "x has rank 1"),
        "x is transposed": ({0: np.zeros((64, 3), dtype=np.float32).T}, {}, "stride 1"),
        "x is missing": ({0: None}, {}, "x is missing"),
        "weight is missing": ({1: None}, {}, "weight is missing"),
        "weight is too short": ({1: np.zeros(40 * 32 - 1, dtype=np.uint8)}, {}, "weight has 1279 elements"),
        "weight has another type": ({1: np.zeros(40 * 32, dtype=np.int8)}, {}, "weight has the wrong element type"),
        "weight has gaps": ({1: np.zeros(80 * 32, dtype=np.uint8)[::2]}, {}, "weight is not contiguous"),
        "scales are missing": ({2: None}, {}, "needs scales"),
        "scales are too few": ({2: np.zeros((40, 1), dtype=np.float16)}, {}, "scales has 40 elements"),
        "scales are integers": ({2: np.zeros((40, 2), dtype=np.int32)}, {}, "scales has the wrong element type"),
        "zero points are too few": ({3: np.zeros(39, dtype=np.uint8)}, {}, "zero_points has 39 elements"),
        "bias is too short": ({4: np.zeros(39, dtype=np.float32)}, {}, "bias has 39 elements"),
        "bias is integer": ({4: np.zeros(40, dtype=np.int64)}, {}, "bias is neither"),
        "no such format": ({}, {"format": "int2"}, "format is int2"),
        "another format": ({}, {"format": "bf16"}, "weight has the wrong element type"),
        "group 0": ({}, {"group": 0}, "group is 0"),
        "group -2": ({}, {"group": -2}, "group is -2"),
        "group of another size": ({}, {"group": 16}, "scales has 80 elements"),
        "no channels": ({}, {"channels": 0}, "channels is 0"),
        "absurd channels": ({}, {"channels": 2**31 - 1}, "y has size 40"),
        "too many channels": ({}, {"channels": 2**62}, "channels is 4611686018427387904"),
        "negative features": ({}, {"features": -64}, "features is -64"),
        "format is a number": ({}, {"format": 4}, "wrong type"),
        "no such activation": ({}, {"activation": "tan", "layout": "concat"}, "no activation called tan"),
        "no such layout": ({}, {"activation": "silu", "layout": "rows"}, "layout is rows"),
        "layout is missing": ({}, {"activation": "silu"}, "an attribute is missing"),
        "y has no gate": ({}, {"activation": "silu", "layout": "concat"}, "y has size 40"),
    }


@pytest.mark.parametrize("case", hostile())
def test_refuses(case: str) -> None:
    inputs, attributes, message = hostile()[case]
    rng = np.random.default_rng(9)
    weight = stored_weight(rng, (40, 64), Spec("int4", group=32))
    operands: list[Argument] = [np.zeros((3, 64), dtype=np.float32), *weight.operands, None]
    for i, argument in inputs.items():
        operands[i] = argument
    y = np.zeros((3, 40), dtype=np.float32)
    with pytest.raises(_cpu.BlueprintError, match=message):
        run_operation("FloatLinear", operands, [y], {"channels": 40, "features": 64, **weight.attributes, **attributes})


def test_refuses_y_of_other_rows() -> None:
    weight = stored_weight(np.random.default_rng(10), (40, 64), Spec("f32"))
    x, y = np.zeros((3, 64), dtype=np.float32), np.zeros((2, 40), dtype=np.float32)
    with pytest.raises(_cpu.BlueprintError, match="another number of rows"):
        run_operation("FloatLinear", [x, *weight.operands], [y], {"channels": 40, "features": 64, "format": "f32"})


def test_refuses_scales_of_plain_weights() -> None:
    weight = stored_weight(np.random.default_rng(11), (40, 64), Spec("f32"))
    x, y = np.zeros((3, 64), dtype=np.float32), np.zeros((3, 40), dtype=np.float32)
    scales = np.zeros(40, dtype=np.float32)
    for i in (1, 2):
        inputs: list[Argument] = [x, *weight.operands]
        inputs[1 + i] = scales
        with pytest.raises(_cpu.BlueprintError, match="has no"):
            run_operation("FloatLinear", inputs, [y], {"channels": 40, "features": 64, "format": "f32"})

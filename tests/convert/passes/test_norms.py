from __future__ import annotations

import onnx_ir as ir
import pytest

from inferencex.convert.passes.editing import is_weight
from inferencex.convert.passes.norms import fuse_norms
from inferencex.convert.passes.weights import fold_weights
from tests.convert.passes.graphs import TOKENS, Builder, assert_equal, only, text, types

WIDTH, EPSILON = 8, 0.03


def _square(b: Builder, x: ir.Value, how: str) -> ir.Value:
    return b.node("Pow", x, b.constant(2.0)) if how == "pow" else b.node("Mul", x, x)


def _normalized(b: Builder, x: ir.Value, mean: ir.Value, how: str) -> ir.Value:
    shifted = b.node("Add", mean, b.constant(EPSILON))
    match how:
        case "reciprocal":
            return b.node("Mul", x, b.node("Reciprocal", b.node("Sqrt", shifted)))
        case "one over":
            return b.node("Mul", b.node("Div", b.constant(1.0), b.node("Sqrt", shifted)), x)
        case "divided":
            return b.node("Div", x, b.node("Sqrt", shifted))
        case "power":
            return b.node("Mul", x, b.node("Pow", shifted, b.constant(-0.5)))
    raise AssertionError(how)


def _rms(b: Builder, x: ir.Value, square: str = "pow", root: str = "reciprocal", axis: int = -1) -> ir.Value:
    mean = b.node("ReduceMean", _square(b, x, square), b.constant([axis]), keepdims=1)
    return _normalized(b, x, mean, root)


@pytest.mark.parametrize("square", ["pow", "mul"])
@pytest.mark.parametrize("root", ["reciprocal", "one over", "divided", "power"])
@pytest.mark.parametrize("weight_first", [False, True])
def test_rms_norm_in_every_spelling(square: str, root: str, weight_first: bool) -> None:
    b = Builder()
    x, weight = b.input("x", ["tokens", WIDTH]), b.parameter("weight", WIDTH)
    y = _rms(b, x, square, root)
    model = b.model(b.node("Mul", *((weight, y) if weight_first else (y, weight))))
    feeds = {"x": b.random(TOKENS, WIDTH)}
    expected = b.evaluate(model, feeds)
    assert fuse_norms(model) == 1
    assert types(model) == {"RMSNormalization": 1}
    norm = only(model, "RMSNormalization")
    assert norm.inputs[1] is weight
    assert norm.attributes["epsilon"].value == pytest.approx(EPSILON)
    assert_equal(b.evaluate(model, feeds), expected)


@pytest.mark.parametrize("axis", [-1, 2])
def test_norm_of_heads(axis: int) -> None:
    b = Builder()
    x, weight = b.input("x", ["tokens", 3, WIDTH]), b.parameter("weight", WIDTH)
    model = b.model(b.node("Mul", weight, _rms(b, x, axis=axis)))
    feeds = {"x": b.random(TOKENS, 3, WIDTH)}
    expected = b.evaluate(model, feeds)
    assert fuse_norms(model) == 1
    assert types(model) == {"RMSNormalization": 1}
    assert_equal(b.evaluate(model, feeds), expected)


def test_one_plus_weight_is_folded_into_the_scale() -> None:
    b = Builder()
    x, weight = b.input("x", ["tokens", WIDTH]), b.parameter("weight", WIDTH)
    scale = b.node("Add", weight, b.constant(1.0))
    model = b.model(b.node("Mul", _rms(b, x), scale))
    feeds = {"x": b.random(TOKENS, WIDTH)}
    expected = b.evaluate(model, feeds)
    fold_weights(model)
    assert fuse_norms(model) == 1
    assert types(model) == {"RMSNormalization": 1}
    assert is_weight(only(model, "RMSNormalization").inputs[1])
    assert_equal(b.evaluate(model, feeds), expected)


def test_a_norm_without_weight_gets_ones() -> None:
    b = Builder()
    x = b.input("x", ["tokens", WIDTH])
    model = b.model(_rms(b, x))
    feeds = {"x": b.random(TOKENS, WIDTH)}
    expected = b.evaluate(model, feeds)
    assert fuse_norms(model) == 1
    assert types(model) == {"RMSNormalization": 1}
    assert_equal(b.evaluate(model, feeds), expected)


def test_a_factor_that_is_computed_is_not_the_scale() -> None:
    b = Builder()
    x, gate = b.input("x", ["tokens", WIDTH]), b.input("gate", ["tokens", WIDTH])
    model = b.model(b.node("Mul", _rms(b, x), gate))
    feeds = {"x": b.random(TOKENS, WIDTH), "gate": b.random(TOKENS, WIDTH)}
    expected = b.evaluate(model, feeds)
    assert fuse_norms(model) == 1
    assert types(model) == {"RMSNormalization": 1, "Mul": 1}
    assert_equal(b.evaluate(model, feeds), expected)


def test_a_vector_that_is_computed_is_not_the_scale() -> None:
    b = Builder()
    x, vector = b.input("x", ["tokens", WIDTH]), b.input("vector", [WIDTH])
    model = b.model(b.node("Mul", _rms(b, x), vector))
    fuse_norms(model)
    assert types(model) == {"RMSNormalization": 1, "Mul": 1}


def test_the_normalized_value_may_have_other_readers() -> None:
    b = Builder()
    x, weight = b.input("x", ["tokens", WIDTH]), b.parameter("weight", WIDTH)
    y = _rms(b, x)
    model = b.model(b.node("Mul", y, weight), b.node("Neg", y))
    feeds = {"x": b.random(TOKENS, WIDTH)}
    expected = b.evaluate(model, feeds)
    assert fuse_norms(model) == 1
    assert types(model) == {"RMSNormalization": 1, "Mul": 1, "Neg": 1}
    assert_equal(b.evaluate(model, feeds), expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("root", ["reciprocal", "divided"])
def test_a_layer_norm_spelled_out(root: str, weighted: bool, bias: bool) -> None:
    b = Builder()
    x, weight, shift = b.input("x", ["tokens", WIDTH]), b.parameter("weight", WIDTH), b.parameter("bias", WIDTH)
    centered = b.node("Sub", x, b.node("ReduceMean", x, b.constant([-1]), keepdims=1))
    y = _rms(b, centered, root=root)
    y = b.node("Mul", y, weight) if weighted else y
    model = b.model(b.node("Add", y, shift) if bias else y)
    feeds = {"x": b.random(TOKENS, WIDTH)}
    expected = b.evaluate(model, feeds)
    assert fuse_norms(model) == 1
    assert types(model) == {"LayerNormalization": 1}
    assert_equal(b.evaluate(model, feeds), expected)


def _mean_over_tokens(b: Builder, x: ir.Value) -> ir.Value:
    return _rms(b, x, axis=0)


def _divided_by_itself(b: Builder, x: ir.Value) -> ir.Value:
    """`root / x` is no norm."""
    mean = b.node("ReduceMean", _square(b, x, "mul"), b.constant([-1]), keepdims=1)
    return b.node("Div", b.node("Sqrt", b.node("Add", mean, b.constant(EPSILON))), x)


def _cubed(b: Builder, x: ir.Value) -> ir.Value:
    mean = b.node("ReduceMean", b.node("Pow", x, b.constant(4.0)), b.constant([-1]), keepdims=1)
    return _normalized(b, x, mean, "reciprocal")


def _of_another_value(b: Builder, x: ir.Value) -> ir.Value:
    mean = b.node("ReduceMean", _square(b, x, "mul"), b.constant([-1]), keepdims=1)
    return _normalized(b, b.node("Neg", x), mean, "reciprocal")


@pytest.mark.parametrize("other", [_mean_over_tokens, _divided_by_itself, _cubed, _of_another_value])
def test_what_is_no_norm_stays(other: object) -> None:
    b = Builder()
    x = b.input("x", ["tokens", WIDTH])
    model = b.model(other(b, x))  # type: ignore[operator]
    before = text(model)
    assert fuse_norms(model) == 0
    assert text(model) == before

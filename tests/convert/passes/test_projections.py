from __future__ import annotations

import onnx_ir as ir
import pytest

from inferencex.convert.passes.projections import merge_projections
from inferencex.convert.passes.weights import expression_of
from inferencex.formats.dialect import DOMAIN
from tests.convert.passes.graphs import TOKENS, Builder, assert_equal, only, text, types

IN, HEADS, GROUPS, DIM = 6, 4, 2, 4


def _linear(b: Builder, x: ir.Value, name: str, heads: int, bias: bool = False) -> ir.Value:
    biases = [b.parameter(f"{name}.bias", heads * DIM)] if bias else []
    return b.node("Gemm", x, b.parameter(name, heads * DIM, IN), *biases, transB=1, shape=["tokens", heads * DIM])


def _attention(b: Builder, q: ir.Value, k: ir.Value, v: ir.Value) -> ir.Value:
    attributes = {"layer": 0, "num_heads": HEADS, "num_kv_heads": GROUPS, "scale": 0.5}
    return b.node("Attention", q, k, v, domain=DOMAIN, **attributes)


@pytest.mark.parametrize("bias", [False, True])
def test_three_projections_become_one(bias: bool) -> None:
    b = Builder()
    x = b.input("x", ["tokens", IN])
    q, k, v = (_linear(b, x, n, h, bias) for n, h in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)))
    model = b.model(_attention(b, q, k, v))
    feeds = {"x": b.random(TOKENS, IN)}
    expected = b.evaluate(model, feeds)
    assert merge_projections(model) == 1
    assert types(model) == {"Gemm": 1, "Split": 1, "Attention": 1}
    weight = only(model, "Gemm").inputs[1]
    assert weight is not None and weight.shape == [(HEADS + 2 * GROUPS) * DIM, IN]
    assert expression_of(weight).parameters == ("q", "k", "v")
    assert_equal(b.evaluate(model, feeds), expected)


def test_norms_of_heads_and_rotations_stand_between() -> None:
    b = Builder()
    x = b.input("x", ["tokens", IN])
    q, k, v = (_linear(b, x, n, h) for n, h in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)))

    def normed(value: ir.Value, heads: int, name: str) -> ir.Value:
        split = b.node("Reshape", value, b.constant([-1, heads, DIM]), shape=["tokens", heads, DIM])
        y = b.node("RMSNormalization", split, b.parameter(name, DIM), axis=-1)
        return b.node("Reshape", y, b.constant([-1, heads * DIM]), shape=["tokens", heads * DIM])

    model = b.model(_attention(b, normed(q, HEADS, "q_norm"), normed(k, GROUPS, "k_norm"), v))
    feeds = {"x": b.random(TOKENS, IN)}
    expected = b.evaluate(model, feeds)
    assert merge_projections(model) == 1
    assert types(model)["Gemm"] == 1
    assert_equal(b.evaluate(model, feeds), expected)


def test_only_projections_of_one_input_are_merged() -> None:
    b = Builder()
    x, z = b.input("x", ["tokens", IN]), b.input("z", ["tokens", IN])
    model = b.model(_attention(b, _linear(b, z, "q", HEADS), _linear(b, x, "k", GROUPS), _linear(b, x, "v", GROUPS)))
    feeds = {"x": b.random(TOKENS, IN), "z": b.random(TOKENS, IN)}
    expected = b.evaluate(model, feeds)
    assert merge_projections(model) == 1
    assert types(model) == {"Gemm": 2, "Split": 1, "Attention": 1}
    assert_equal(b.evaluate(model, feeds), expected)


def test_a_projection_of_keys_that_are_also_the_values() -> None:
    b = Builder()
    x = b.input("x", ["tokens", IN])
    k = _linear(b, x, "k", GROUPS)
    model = b.model(_attention(b, _linear(b, x, "q", HEADS), k, k))
    feeds = {"x": b.random(TOKENS, IN)}
    expected = b.evaluate(model, feeds)
    assert merge_projections(model) == 1
    assert types(model) == {"Gemm": 1, "Split": 1, "Attention": 1}
    assert_equal(b.evaluate(model, feeds), expected)


@pytest.mark.parametrize("case", ["already packed", "bias on one", "nonlinear between"])
def test_other_projections_stay(case: str) -> None:
    b = Builder()
    x = b.input("x", ["tokens", IN])
    if case == "already packed":
        packed = _linear(b, x, "qkv", HEADS + 2 * GROUPS)
        q, k, v = b.nodes("Split", packed, b.constant([HEADS * DIM, GROUPS * DIM, GROUPS * DIM]), axis=1, outputs=3)
    elif case == "bias on one":
        q, k, v = _linear(b, x, "q", HEADS, True), _linear(b, x, "k", GROUPS), b.input("v", ["tokens", GROUPS * DIM])
    else:
        q, k = (b.node("Tanh", _linear(b, x, n, h)) for n, h in (("q", HEADS), ("k", GROUPS)))
        v = _linear(b, x, "v", GROUPS)
    model = b.model(_attention(b, q, k, v))
    before = text(model)
    assert merge_projections(model) == 0
    assert text(model) == before

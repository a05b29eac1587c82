from __future__ import annotations

import onnx_ir as ir
import pytest

from inferencex.convert.passes.experts import fuse_experts
from inferencex.formats.dialect import DOMAIN
from tests.convert.passes.graphs import TOKENS, Array, Builder, assert_equal, only, text, types

WIDTH, INNER, EXPERTS, K = 6, 5, 4, 2


def _layer(b: Builder, *, bias: bool = False, gated: bool = True, weigh: bool = True, mean: bool = False) -> ir.Value:
    """The spelling of the expert route: rows `[T * k]`, two linears, a product with the weights, a sum over `k`."""
    x = b.input("x", ["tokens", WIDTH])
    index, weights = b.input("index", ["tokens", K], dtype=ir.DataType.INT64), b.input("weights", ["tokens", K])
    spread = b.node(
        "Expand", b.node("Unsqueeze", x, b.constant([1])), b.constant([1, K, 1]), shape=["tokens", K, WIDTH]
    )
    rows = b.node("Reshape", spread, b.constant([-1, WIDTH]), shape=["rows", WIDTH])
    ids = b.node("Reshape", index, b.constant([-1]), shape=["rows"], dtype=ir.DataType.INT64)
    features = 2 * INNER if gated else INNER
    up_bias = [b.parameter("up.bias", EXPERTS, features)] if bias else []
    inner = b.node("ExpertLinear", rows, ids, b.parameter("up", EXPERTS, features, WIDTH), *up_bias, domain=DOMAIN)
    if gated:
        gate = {"activation": "swiglu_clamped", "layout": "interleaved", "alpha": 1.702, "limit": 0.9}
        inner = b.node("GatedActivation", inner, domain=DOMAIN, **gate)
    else:
        inner = b.node("Relu", inner)
    down_bias = [b.parameter("down.bias", EXPERTS, WIDTH)] if bias else []
    outer = b.node("ExpertLinear", inner, ids, b.parameter("down", EXPERTS, WIDTH, INNER), *down_bias, domain=DOMAIN)
    if weigh:
        outer = b.node("Mul", outer, b.node("Reshape", weights, b.constant([-1, 1]), shape=["rows", 1]))
    folded = b.node("Reshape", outer, b.constant([-1, K, WIDTH]), shape=["tokens", K, WIDTH])
    return b.node("ReduceMean" if mean else "ReduceSum", folded, b.constant([1]), keepdims=0)


def _feeds(b: Builder) -> dict[str, Array]:
    index = b.rng.integers(0, EXPERTS, (TOKENS, K))
    return {"x": b.random(TOKENS, WIDTH), "index": index, "weights": b.random(TOKENS, K)}


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_of_experts_becomes_one_node(bias: bool) -> None:
    b = Builder()
    model = b.model(_layer(b, bias=bias))
    feeds = _feeds(b)
    expected = b.evaluate(model, feeds)
    assert fuse_experts(model) == 1
    assert types(model) == {"Experts": 1}
    node = only(model, "Experts")
    assert [v and v.name for v in node.inputs[:5]] == ["x", "index", "weights", "up", "down"]
    assert node.attributes["activation"].value == "swiglu_clamped"
    assert node.attributes["layout"].value == "interleaved"
    assert_equal(b.evaluate(model, feeds), expected)


@pytest.mark.parametrize("case", [{"gated": False}, {"weigh": False}, {"mean": True}])
def test_other_layers_keep_their_linears(case: dict[str, bool]) -> None:
    b = Builder()
    model = b.model(_layer(b, **case))
    before = text(model)
    assert fuse_experts(model) == 0
    assert text(model) == before

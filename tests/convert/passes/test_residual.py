from __future__ import annotations

import pytest

from inferencex.convert.passes.residual import fuse_residual_norms
from tests.convert.passes.graphs import TOKENS, Builder, assert_equal, only, text, types

WIDTH = 6


@pytest.mark.parametrize("op_type", ["RMSNormalization", "LayerNormalization"])
@pytest.mark.parametrize("sum_is_read", [False, True])
def test_addition_and_norm_become_one(op_type: str, sum_is_read: bool) -> None:
    b = Builder()
    x, residual = b.input("x", ["tokens", WIDTH]), b.input("residual", ["tokens", WIDTH])
    total = b.node("Add", residual, x)
    weights = [b.parameter("scale", WIDTH)] + ([b.parameter("bias", WIDTH)] if op_type == "LayerNormalization" else [])
    y = b.node(op_type, total, *weights, axis=-1, epsilon=0.02)
    model = b.model(y, *([b.node("Neg", total)] if sum_is_read else []))
    feeds = {"x": b.random(TOKENS, WIDTH), "residual": b.random(TOKENS, WIDTH)}
    expected = b.evaluate(model, feeds)
    assert fuse_residual_norms(model) == 1
    assert types(model) == {f"Add{op_type}": 1} | ({"Neg": 1} if sum_is_read else {})
    assert only(model, f"Add{op_type}").attributes["epsilon"].value == pytest.approx(0.02)
    assert_equal(b.evaluate(model, feeds), expected)


def test_a_chain_of_layers() -> None:
    b = Builder()
    stream = b.input("x", ["tokens", WIDTH])
    for layer in range(3):
        branch = b.node("Tanh", b.node("RMSNormalization", stream, b.parameter(f"scale{layer}", WIDTH), axis=-1))
        stream = b.node("Add", stream, branch)
    model = b.model(b.node("RMSNormalization", stream, b.parameter("final", WIDTH), axis=-1))
    feeds = {"x": b.random(TOKENS, WIDTH)}
    expected = b.evaluate(model, feeds)
    assert fuse_residual_norms(model) == 3
    assert types(model) == {"RMSNormalization": 1, "AddRMSNormalization": 3, "Tanh": 3}
    assert_equal(b.evaluate(model, feeds), expected)


def test_the_residual_stream_is_the_second_input() -> None:
    b = Builder()
    x = b.input("x", ["tokens", WIDTH])
    first = b.node("Add", x, b.node("Tanh", x))
    normed = b.node("RMSNormalization", first, b.parameter("a", WIDTH), axis=-1)
    second = b.node("Add", first, b.node("Tanh", normed))  # the stream is written first here
    model = b.model(b.node("RMSNormalization", second, b.parameter("b", WIDTH), axis=-1))
    fuse_residual_norms(model)
    last = [node for node in model.graph if node.op_type == "AddRMSNormalization"][-1]
    assert [v.producer().op_type for v in last.inputs[:2]] == ["Tanh", "AddRMSNormalization"]  # type: ignore[union-attr]


def test_a_scaled_embedding_is_the_residual_stream() -> None:
    """It is told by its readers: a branch has one."""
    b = Builder()
    stream = b.node("Mul", b.input("x", ["tokens", WIDTH]), b.constant(3.0))
    branch = b.node("Tanh", b.node("RMSNormalization", stream, b.parameter("a", WIDTH), axis=-1))
    total = b.node("Add", stream, branch)
    model = b.model(b.node("RMSNormalization", total, b.parameter("b", WIDTH), axis=-1))
    fuse_residual_norms(model)
    fused = only(model, "AddRMSNormalization")
    assert [v.producer().op_type for v in fused.inputs[:2]] == ["Tanh", "Mul"]  # type: ignore[union-attr]


def test_bias_broadcasts_and_norms_of_heads_stay() -> None:
    b = Builder()
    x, heads = b.input("x", ["tokens", WIDTH]), b.input("heads", ["tokens", 2, WIDTH])
    with_bias = b.node("Add", x, b.parameter("bias", WIDTH))
    a = b.node("RMSNormalization", with_bias, b.parameter("s", WIDTH), axis=-1)
    c = b.node("RMSNormalization", b.node("Add", heads, heads), b.parameter("t", WIDTH), axis=-1)
    model = b.model(a, c, b.node("RMSNormalization", x, b.parameter("u", WIDTH), axis=-1))
    before = text(model)
    assert fuse_residual_norms(model) == 0
    assert text(model) == before

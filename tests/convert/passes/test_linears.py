from __future__ import annotations

import numpy as np
import onnx_ir as ir

from inferencex.convert.passes.linears import canonicalize_linears
from inferencex.convert.passes.weights import expression_of, fold_weights, mark_parameters
from tests.convert.passes.graphs import TOKENS, Builder, assert_equal, only, text, types

IN, OUT = 6, 4


def test_a_torch_linear_keeps_the_checkpoints_tensor() -> None:
    b = Builder()
    x, weight = b.input("x", ["tokens", IN]), b.parameter("weight", OUT, IN)
    model = b.model(b.node("MatMul", x, b.node("Transpose", weight, perm=[1, 0])))
    feeds = {"x": b.random(TOKENS, IN)}
    expected = b.evaluate(model, feeds)
    fold_weights(model)
    assert canonicalize_linears(model) == 1
    assert types(model) == {"Gemm": 1}
    stored = only(model, "Gemm").inputs[1]
    assert stored is not None and stored.name == "weight" and not expression_of(stored).nodes
    assert set(model.graph.initializers) == {"weight"}
    assert_equal(b.evaluate(model, feeds), expected)


def test_conv1d_is_transposed_once_and_named_so() -> None:
    """GPT-2 stores its weights input features first."""
    b = Builder()
    x, weight, bias = b.input("x", ["tokens", IN]), b.parameter("weight", IN, OUT), b.parameter("bias", OUT)
    model = b.model(b.node("Gemm", x, weight, bias), b.node("MatMul", x, weight))
    feeds = {"x": b.random(TOKENS, IN)}
    expected = b.evaluate(model, feeds)
    assert canonicalize_linears(model) == 2
    assert types(model) == {"Gemm": 2}
    assert set(model.graph.initializers) == {"weight.transposed", "bias"}
    assert model.graph.initializers["weight.transposed"].shape == [OUT, IN]
    assert all(node.attributes["transB"].value == 1 for node in model.graph)
    assert_equal(b.evaluate(model, feeds), expected)


def test_a_bias_behind_the_product_moves_in() -> None:
    for first in (False, True):
        b = Builder()
        x, weight, bias = b.input("x", ["tokens", IN]), b.parameter("weight", IN, OUT), b.parameter("bias", OUT)
        product = b.node("MatMul", x, weight)
        model = b.model(b.node("Add", *((bias, product) if first else (product, bias))))
        feeds = {"x": b.random(TOKENS, IN)}
        expected = b.evaluate(model, feeds)
        assert canonicalize_linears(model) == 1
        assert types(model) == {"Gemm": 1}
        assert_equal(b.evaluate(model, feeds), expected)


def test_a_residual_addition_is_no_bias() -> None:
    b = Builder()
    x, weight, other = b.input("x", ["tokens", IN]), b.parameter("weight", IN, OUT), b.input("r", ["tokens", OUT])
    model = b.model(b.node("Add", b.node("MatMul", x, weight), other))
    canonicalize_linears(model)
    assert types(model) == {"Gemm": 1, "Add": 1}


def test_a_vector_that_is_computed_is_no_bias() -> None:
    b = Builder()
    x, weight, vector = b.input("x", ["tokens", IN]), b.parameter("weight", IN, OUT), b.input("v", [OUT])
    model = b.model(b.node("Add", b.node("MatMul", x, weight), vector))
    canonicalize_linears(model)
    assert types(model) == {"Gemm": 1, "Add": 1}


def test_tied_weights_are_one_initializer() -> None:
    b = Builder()
    ids, x = b.input("ids", ["tokens"], dtype=ir.DataType.INT64), b.input("x", ["tokens", IN])
    embedding, head = b.parameter("embed.weight", OUT, IN), b.parameter("head.weight", OUT, IN)
    b.parameters["head.weight"] = b.parameters["embed.weight"]
    rows = b.node("Gather", embedding, ids)
    logits = b.node("MatMul", x, b.node("Transpose", head, perm=[1, 0]))
    model = b.model(rows, logits)
    feeds = {"ids": np.arange(TOKENS) % OUT, "x": b.random(TOKENS, IN)}
    expected = b.evaluate(model, feeds)
    mark_parameters(model.graph, {"embed.weight", "head.weight"}, {"head.weight": "embed.weight"})
    fold_weights(model)
    canonicalize_linears(model)
    assert types(model) == {"Gather": 1, "Gemm": 1}
    assert set(model.graph.initializers) == {"embed.weight"}
    assert_equal(b.evaluate(model, feeds), expected)


def test_scaled_transposed_and_batched_products_stay() -> None:
    b = Builder()
    x, weight = b.input("x", ["tokens", IN]), b.parameter("weight", OUT, IN)
    tall, batch = b.input("tall", [OUT, "tokens"]), b.input("batch", [2, "tokens", OUT])
    model = b.model(
        b.node("Gemm", x, weight, transB=1, alpha=0.5),
        b.node("Gemm", tall, weight, transA=1),
        b.node("MatMul", batch, weight),
        b.node("MatMul", x, b.node("Transpose", x, perm=[1, 0])),
    )
    before = text(model)
    assert canonicalize_linears(model) == 0
    assert text(model) == before

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from inferencex.convert.passes.rows import gather_rows_early
from inferencex.formats.dialect import DOMAIN
from tests.convert.passes.graphs import TOKENS, Array, Builder, assert_equal, text, types

WIDTH, VOCAB = 6, 9


def _inputs(b: Builder) -> tuple[ir.Value, ir.Value]:
    ids = b.input("token_ids", ["tokens"], dtype=ir.DataType.INT64)
    return ids, b.input("logit_rows", ["rows"], dtype=ir.DataType.INT64)


def _feeds() -> dict[str, Array]:
    return {"token_ids": np.arange(TOKENS) % VOCAB, "logit_rows": np.array([1, 4, 6])}


def _linear(b: Builder, x: ir.Value, name: str, features: int) -> ir.Value:
    width = x.shape[-1] if x.shape is not None else WIDTH
    assert isinstance(width, int)
    return b.node("Gemm", x, b.parameter(name, features, width), transB=1, shape=["tokens", features])


def _block(b: Builder, stream: ir.Value, layer: int) -> ir.Value:
    """Attention with its residual, then a gated feed-forward layer with its own."""
    shape: dict[str, Any] = {"shape": ["tokens", WIDTH]}
    normed = b.node("RMSNormalization", stream, b.parameter(f"norm{layer}", WIDTH), axis=-1, **shape)
    q, k, v = (_linear(b, normed, f"{n}{layer}", WIDTH) for n in "qkv")
    attributes = {"layer": layer, "num_heads": 2, "num_kv_heads": 2, "scale": 0.5}
    y = _linear(b, b.node("Attention", q, k, v, domain=DOMAIN, **attributes, **shape), f"o{layer}", WIDTH)
    normed, stream = b.nodes(
        "AddRMSNormalization", y, stream, b.parameter(f"post{layer}", WIDTH), domain=DOMAIN, outputs=2, **shape
    )
    stream.shape, stream.type = ir.Shape(["tokens", WIDTH]), ir.TensorType(ir.DataType.FLOAT)
    gated = b.node(
        "GatedActivation", _linear(b, normed, f"up{layer}", 8), domain=DOMAIN, activation="silu", shape=["tokens", 4]
    )
    return b.node("Add", stream, _linear(b, gated, f"down{layer}", WIDTH), **shape)


def _rows_of(model: ir.Model) -> dict[str, list[str]]:
    """List, per operator, the first dimension of what it computes."""
    found: dict[str, list[str]] = {}
    for node in model.graph:
        shape = node.outputs[0].shape
        found.setdefault(node.op_type, []).append("?" if shape is None else str(shape[0]))
    return found


def test_all_after_the_last_attention_sees_only_sampled_rows() -> None:
    b = Builder()
    ids, rows = _inputs(b)
    stream = b.node("Gather", b.parameter("embed", VOCAB, WIDTH), ids, shape=["tokens", WIDTH])
    for layer in range(2):
        stream = _block(b, stream, layer)
    normed = b.node("RMSNormalization", stream, b.parameter("final", WIDTH), axis=-1)
    picked = b.node("Gather", normed, rows, axis=0, shape=["rows", WIDTH])
    model = b.model(b.node("Gemm", picked, b.parameter("head", VOCAB, WIDTH), transB=1))
    expected = b.evaluate(model, _feeds())
    assert gather_rows_early(model) > 4
    found = _rows_of(model)
    assert found["Attention"] == ["tokens", "tokens"]
    assert found["AddRMSNormalization"] == ["tokens", "rows"]
    assert found["GatedActivation"] == ["tokens", "rows"]
    assert found["RMSNormalization"] == ["tokens", "tokens", "rows"]
    # first layer: q, k, v, o, up, down; last layer: q, k, v, then o, up, down on rows; the head
    assert found["Gemm"] == ["tokens"] * 9 + ["rows"] * 4
    assert found["Gather"] == ["tokens", "rows", "rows"]  # embedding, attention's output, residual stream
    assert_equal(b.evaluate(model, _feeds()), expected)


def test_a_value_that_is_read_at_all_rows_is_not_picked_early() -> None:
    b = Builder()
    ids, rows = _inputs(b)
    x = b.node("Gather", b.parameter("embed", VOCAB, WIDTH), ids, shape=["tokens", WIDTH])
    y = b.node("Tanh", x)
    picked = b.node("Gather", b.node("Exp", y), rows, axis=0, shape=["rows", WIDTH])
    total = b.node("ReduceSum", y, b.constant([0]), keepdims=1, shape=[1, WIDTH])
    model = b.model(picked, total)
    expected = b.evaluate(model, _feeds())
    assert gather_rows_early(model) == 1
    assert _rows_of(model)["Tanh"] == ["tokens"] and _rows_of(model)["Exp"] == ["rows"]
    assert_equal(b.evaluate(model, _feeds()), expected)


def test_what_all_rows_share_is_not_picked() -> None:
    b = Builder()
    ids, rows = _inputs(b)
    x = b.node("Gather", b.parameter("embed", VOCAB, WIDTH), ids, shape=["tokens", WIDTH])
    shift = b.node("Exp", b.input("shift", [1, WIDTH]))
    model = b.model(b.node("Gather", b.node("Add", x, shift), rows, axis=0, shape=["rows", WIDTH]))
    feeds = _feeds() | {"shift": b.random(1, WIDTH)}
    expected = b.evaluate(model, feeds)
    assert gather_rows_early(model) == 1
    assert shift.shape == [1, WIDTH]
    assert_equal(b.evaluate(model, feeds), expected)


def test_both_sides_of_a_product_per_row_are_picked() -> None:
    """Each token's own weights on its own stack of vectors, as experts are mixed by some models."""
    b = Builder()
    ids, rows = _inputs(b)
    weights = b.node("Gather", b.parameter("weights", VOCAB, 1, 3), ids, shape=["tokens", 1, 3])
    stacks = b.node("Exp", b.node("Gather", b.parameter("stacks", VOCAB, 3, WIDTH), ids, shape=["tokens", 3, WIDTH]))
    mixed = b.node("MatMul", weights, stacks, shape=["tokens", 1, WIDTH])
    model = b.model(b.node("Gather", mixed, rows, axis=0, shape=["rows", 1, WIDTH]))
    expected = b.evaluate(model, _feeds())
    assert gather_rows_early(model) == 2
    assert _rows_of(model)["MatMul"] == _rows_of(model)["Exp"] == ["rows"]
    assert_equal(b.evaluate(model, _feeds()), expected)


def test_an_operator_along_the_tokens_is_not_passed() -> None:
    b = Builder()
    ids, rows = _inputs(b)
    x = b.node("Gather", b.parameter("embed", VOCAB, WIDTH), ids, shape=["tokens", WIDTH])
    model = b.model(b.node("Gather", b.node("Softmax", x, axis=0), rows, axis=0, shape=["rows", WIDTH]))
    before = text(model)
    assert gather_rows_early(model) == 0
    assert text(model) == before


def test_without_picked_rows_nothing_changes() -> None:
    b = Builder()
    ids, _ = _inputs(b)
    model = b.model(b.node("Tanh", b.node("Gather", b.parameter("embed", VOCAB, WIDTH), ids, shape=["tokens", WIDTH])))
    assert gather_rows_early(model) == 0
    assert types(model) == {"Gather": 1, "Tanh": 1}

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from inferencex.convert.passes.token_major import to_token_major
from inferencex.formats.errors import CaptureError
from tests.convert.passes.graphs import TOKENS, Array, Builder, assert_equal, types

WIDTH = 6


def _start(b: Builder) -> ir.Value:
    """The embedding of `token_ids [1, T]`: `[1, T, 6]`."""
    ids = b.input("token_ids", [1, "tokens"], dtype=ir.DataType.INT64)
    b.input("positions", [1, "tokens"], dtype=ir.DataType.INT64)
    b.input("logit_rows", ["rows"], dtype=ir.DataType.INT64)
    return b.node("Gather", b.parameter("embed", 9, WIDTH), ids, shape=[1, "tokens", WIDTH])


def _feeds(b: Builder, batched: bool) -> dict[str, Array]:
    ids, positions = np.array([3, 1, 4, 1, 5, 8, 2]), np.arange(TOKENS)
    return {
        "token_ids": ids[None] if batched else ids,
        "positions": positions[None] if batched else positions,
        "logit_rows": np.array([0, 3, 6]),
    }


def _convert(b: Builder, y: ir.Value) -> ir.Model:
    """Convert and assert that no value has a batch dimension left and the numbers are the same."""
    model = b.model(y)
    (expected,) = b.evaluate(model, _feeds(b, True))
    to_token_major(model)
    assert [str(v.shape) for v in model.graph.inputs] == ["[tokens]", "[tokens]", "[rows]"]
    (got,) = b.evaluate(model, _feeds(b, False))
    assert_equal([got], [expected[0]])
    declared = model.graph.outputs[0].shape
    assert declared is not None
    sizes = {"tokens": TOKENS, "rows": 3}
    assert [d if isinstance(d, int) else sizes[str(d)] for d in declared] == list(got.shape)
    return model


def _linear(b: Builder, x: ir.Value, features: int = 8) -> ir.Value:
    return b.node("MatMul", x, b.parameter(f"w{len(b.parameters)}", WIDTH, features))


def _norm(b: Builder, x: ir.Value) -> ir.Value:
    centered = b.node("Sub", x, b.node("ReduceMean", x, b.constant([2]), keepdims=1))
    return b.node("Mul", b.node("Add", centered, b.constant(0.5)), b.parameter("scale", WIDTH))


def _heads(b: Builder, x: ir.Value) -> ir.Value:
    split = b.node("Reshape", x, b.constant([1, -1, 2, 3]), shape=[1, "tokens", 2, 3])
    turned = b.node("Transpose", split, perm=[0, 2, 1, 3])
    y = b.node("Softmax", b.node("Mul", turned, b.constant(2.0)), axis=3)
    back = b.node("Transpose", y, perm=[0, 2, 1, 3])
    return b.node("Reshape", back, b.constant([1, -1, WIDTH]), shape=[1, "tokens", WIDTH])


def _split(b: Builder, x: ir.Value) -> ir.Value:
    a, c = b.nodes("Split", x, b.constant([2, 4]), axis=2, outputs=2)
    y = b.node("Concat", c, a, axis=2)
    return b.node("Slice", y, b.constant([1]), b.constant([5]), b.constant([2]), b.constant([2]))


def _picked(b: Builder, x: ir.Value) -> ir.Value:
    return b.node("Gather", x, b.graph.inputs[2], axis=1, shape=[1, "rows", WIDTH])


def _broadcast(b: Builder, x: ir.Value) -> ir.Value:
    """A constant with a batch dimension, and positions that become a feature."""
    row = b.constant(b.random(1, 1, WIDTH))
    at = b.node("Unsqueeze", b.node("Cast", b.graph.inputs[1], to=ir.DataType.FLOAT), b.constant([2]))
    return b.node("Add", b.node("Mul", x, row), at)


def _top(b: Builder, x: ir.Value) -> ir.Value:
    values, indices = b.nodes("TopK", x, b.constant([WIDTH]), axis=-1, outputs=2)
    found = b.node("GatherElements", x, indices, axis=-1)
    return b.node("Add", values, found)


def _batch_select(b: Builder, x: ir.Value) -> ir.Value:
    """`x[0]` and back."""
    return b.node("Unsqueeze", b.node("Gather", x, b.constant(np.asarray(0)), axis=0), b.constant([0]))


@pytest.mark.parametrize("layer", [_linear, _norm, _heads, _split, _picked, _broadcast, _top, _batch_select])
def test_the_batch_dimension_goes(layer: Callable[[Builder, ir.Value], ir.Value]) -> None:
    b = Builder()
    model = _convert(b, layer(b, _start(b)))
    assert all(
        node.outputs[0].shape is None or node.outputs[0].shape[0] != 1
        for node in model.graph
        if node.op_type != "Unsqueeze"
    )


def test_a_chain_of_all() -> None:
    b = Builder()
    x = _start(b)
    for layer in (_norm, _heads, _batch_select, _broadcast):
        x = b.node("Add", x, layer(b, x))
    _convert(b, _linear(b, _picked(b, x)))


def test_an_unknown_operator_is_wrapped() -> None:
    b = Builder()
    y = b.node("Softsign", b.node("Exp", _start(b)))
    model = _convert(b, b.node("Neg", y))
    assert types(model) == {"Gather": 1, "Exp": 1, "Unsqueeze": 1, "Softsign": 1, "Squeeze": 1, "Neg": 1}


def _convolution(b: Builder, x: ir.Value) -> ir.Value:
    channels = b.node("Transpose", x, perm=[0, 2, 1])
    y = b.node(
        "Conv", channels, b.parameter("kernel", WIDTH, 1, 3), group=WIDTH, pads=[1, 1], shape=[1, WIDTH, "tokens"]
    )
    return b.node("Transpose", y, perm=[0, 2, 1])


def _running_sum(b: Builder, x: ir.Value) -> ir.Value:
    return b.node("CumSum", x, b.constant(np.asarray(1)))


def _total(b: Builder, x: ir.Value) -> ir.Value:
    return b.node("Sub", x, b.node("ReduceSum", x, b.constant([1]), keepdims=1))


def _mean_of_all(b: Builder, x: ir.Value) -> ir.Value:
    return b.node("Sub", x, b.node("ReduceMean", x, keepdims=1))


def _pairs(b: Builder, x: ir.Value) -> ir.Value:
    """Scores of tokens with each other, as attention that was not recognized has them."""
    wide = b.node("MatMul", x, b.node("Transpose", x, perm=[0, 2, 1]), shape=[1, "tokens", "tokens"])
    return b.node("Softmax", wide, axis=-1)


def _softmax(b: Builder, x: ir.Value) -> ir.Value:
    return b.node("Softmax", x, axis=1)


def _shift(b: Builder, x: ir.Value) -> ir.Value:
    """Every token sees the one before it."""
    first = b.node("Slice", x, b.constant([0]), b.constant([1]), b.constant([1]), shape=[1, 1, WIDTH])
    return b.node("Add", x, first)


def _join(b: Builder, x: ir.Value) -> ir.Value:
    return b.node(
        "Slice", b.node("Concat", x, x, axis=1, shape=[1, "twice", WIDTH]), *(b.constant([n]) for n in (0, 2, 1))
    )


def _contraction(b: Builder, x: ir.Value) -> ir.Value:
    return b.node("MatMul", b.node("Transpose", x, perm=[0, 2, 1]), x)


def _flipped(b: Builder, x: ir.Value) -> ir.Value:
    return b.node("Gather", x, b.constant([0, 0]), axis=1, shape=[1, 2, WIDTH])


@pytest.mark.parametrize(
    ("layer", "operator"),
    [
        (_convolution, "Conv"),
        (_running_sum, "CumSum"),
        (_total, "ReduceSum"),
        (_mean_of_all, "ReduceMean"),
        (_softmax, "Softmax"),
        (_pairs, "Softmax"),
        (_shift, "Slice"),
        (_join, "Concat"),
        (_contraction, "MatMul"),
        (_flipped, "Gather"),
    ],
)
def test_what_combines_tokens_is_refused_by_name(layer: Callable[[Builder, ir.Value], ir.Value], operator: str) -> None:
    b = Builder()
    model = b.model(layer(b, _start(b)))
    with pytest.raises(CaptureError, match=rf"{operator} \({operator}_\d+_0\).*tokens"):
        to_token_major(model)


def test_a_weighted_sum_over_tokens_is_refused() -> None:
    """`[1, T, T] @ [1, T, D]`: attention that was not recognized."""
    b = Builder()
    x = _start(b)
    scores = b.node("MatMul", x, b.node("Transpose", x, perm=[0, 2, 1]), shape=[1, "tokens", "tokens"])
    model = b.model(b.node("MatMul", b.node("Tanh", scores), x, shape=[1, "tokens", WIDTH]))
    with pytest.raises(CaptureError, match="MatMul"):
        to_token_major(model)

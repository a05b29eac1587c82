from __future__ import annotations

import logging

import numpy as np
import onnx_ir as ir

from inferencex.convert.passes.simplify import simplify
from inferencex.convert.passes.tidying import remove_no_ops
from tests.convert.passes.graphs import TOKENS, Builder, assert_equal, text, types


def test_reshapes_in_a_row_become_one() -> None:
    b = Builder()
    x = b.input("x", ["tokens", 12])
    y = b.node("Reshape", x, b.constant([-1, 3, 4]), shape=["tokens", 3, 4])
    y = b.node(
        "Reshape",
        b.node("Unsqueeze", y, b.constant([0]), shape=[1, "tokens", 3, 4]),
        b.constant([-1, 6, 2]),
        shape=["tokens", 6, 2],
    )
    model = b.model(b.node("Exp", y))
    feeds = {"x": b.random(TOKENS, 12)}
    expected = b.evaluate(model, feeds)
    assert remove_no_ops(model) > 0
    assert types(model) == {"Reshape": 1, "Exp": 1}
    assert_equal(b.evaluate(model, feeds), expected)


def test_reshapes_and_transposes_that_undo_each_other_go() -> None:
    b = Builder()
    x = b.input("x", ["tokens", 12])
    y = b.node("Reshape", x, b.constant([-1, 3, 4]), shape=["tokens", 3, 4])
    y = b.node("Reshape", y, b.constant([-1, 12]), shape=["tokens", 12])
    y = b.node("Transpose", b.node("Transpose", b.node("Identity", y), perm=[1, 0]), perm=[1, 0])
    y = b.node("Cast", y, to=ir.DataType.FLOAT)
    model = b.model(b.node("Exp", y))
    feeds = {"x": b.random(TOKENS, 12)}
    expected = b.evaluate(model, feeds)
    remove_no_ops(model)
    assert types(model) == {"Exp": 1}
    assert_equal(b.evaluate(model, feeds), expected)


def test_what_changes_numbers_or_order_stays() -> None:
    b = Builder()
    x = b.input("x", ["tokens", 12])
    y = b.node("Transpose", b.node("Reshape", x, b.constant([-1, 3, 4]), shape=["tokens", 3, 4]), perm=[0, 2, 1])
    y = b.node("Reshape", y, b.constant([-1, 12]), shape=["tokens", 12])
    y = b.node("Cast", b.node("Cast", y, to=ir.DataType.INT64), to=ir.DataType.FLOAT)
    model = b.model(b.node("Exp", y))
    feeds = {"x": b.random(TOKENS, 12)}
    expected = b.evaluate(model, feeds)
    before = text(model)
    assert remove_no_ops(model) == 0
    assert text(model) == before
    assert_equal(b.evaluate(model, feeds), expected)


def test_an_output_that_is_a_reshape_keeps_its_shape() -> None:
    b = Builder()
    x = b.input("x", ["tokens", 12])
    model = b.model(b.node("Reshape", b.node("Exp", x), b.constant([-1, 3, 4]), shape=["tokens", 3, 4]))
    remove_no_ops(model)
    assert types(model) == {"Exp": 1, "Reshape": 1}


def test_an_output_that_is_back_in_its_first_shape() -> None:
    b = Builder()
    y = b.node("Exp", b.input("x", ["tokens", 12]))
    y = b.node("Reshape", y, b.constant([-1, 3, 4]), shape=["tokens", 3, 4])
    model = b.model(b.node("Reshape", y, b.constant([-1, 12]), shape=["tokens", 12]))
    feeds = {"x": b.random(TOKENS, 12)}
    expected = b.evaluate(model, feeds)
    remove_no_ops(model)
    assert_equal(b.evaluate(model, feeds), expected)


def test_casts_in_a_row_become_one() -> None:
    b = Builder()
    y = b.node("Cast", b.input("x", ["tokens", 12], dtype=ir.DataType.INT64), to=ir.DataType.FLOAT)
    model = b.model(b.node("Exp", b.node("Cast", y, to=ir.DataType.FLOAT16)))
    assert remove_no_ops(model) == 1
    assert types(model) == {"Cast": 1, "Exp": 1}


def test_constants_are_folded_and_equal_nodes_merged() -> None:
    b = Builder()
    x = b.input("x", ["tokens", 4])
    two = b.node("Add", b.constant(np.float32(1.0)), b.constant(np.float32(1.0)))
    a, c = b.node("Mul", x, two), b.node("Mul", x, two)
    b.node("Exp", x)  # nobody reads it
    model = b.model(b.node("Add", a, c))
    feeds = {"x": b.random(TOKENS, 4)}
    expected = b.evaluate(model, feeds)
    assert simplify(model) == 3
    assert types(model) == {"Mul": 1, "Add": 1}
    assert [v.const_value is not None for v in model.graph.initializers.values()] == [True]
    assert_equal(b.evaluate(model, feeds), expected)


def test_weights_are_neither_folded_nor_dropped() -> None:
    b = Builder()
    x, weight = b.input("x", ["tokens", 4]), b.parameter("w", 4)
    model = b.model(b.node("Mul", x, b.node("Exp", weight)))
    simplify(model)
    assert types(model) == {"Mul": 1, "Exp": 1}
    assert set(model.graph.initializers) == {"w"}


def test_the_log_is_as_it_was() -> None:
    logging.disable(logging.NOTSET)
    b = Builder()
    model = b.model(b.node("Exp", b.input("x", [2])))
    simplify(model)
    assert logging.root.manager.disable == logging.NOTSET

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from inferencex.formats.errors import BundleError
from inferencex.formats.graph import Graph, read_graph
from inferencex.runtime.backends.position_tables import check_positions
from tests.runtime.backends.reference.steps import Model, initializer

ROWS, WIDTH = 16, 6


def _read(model: ir.Model) -> Graph:
    return read_graph(ir.to_proto(model))


def _rotary() -> Graph:
    m = Model()
    x = m.node("Reshape", m.embed(WIDTH), m.weight(3), shape=[1, "tokens", WIDTH])
    ids = m.node("Reshape", m.positions, m.weight(2), shape=[1, "tokens"])
    y = m.node("RotaryEmbedding", x, m.weight(ROWS, 3), m.weight(ROWS, 3), ids, shape=[1, "tokens", WIDTH], num_heads=1)
    return _read(m.finish(m.node("Reshape", y, m.weight(2), shape=["tokens", WIDTH]), WIDTH))


def _learned(offset: int, first: bool = False) -> Graph:
    m = Model()
    index = m.positions
    if offset:
        pair = (index, initializer(m.graph, "offset", np.array(offset, np.int64)))
        index = m.node("Add", *(pair[::-1] if first else pair), shape=["tokens"])
    return _read(m.finish(m.node("Gather", m.weight(ROWS, WIDTH), index, shape=["tokens", WIDTH]), WIDTH))


@pytest.mark.parametrize(
    ("graph", "longest"),
    [(_rotary(), ROWS), (_learned(0), ROWS), (_learned(2), ROWS - 2), (_learned(2, True), ROWS - 2)],
)
def test_tables_that_are_too_short_are_named(graph: Graph, longest: int) -> None:
    check_positions(graph, longest, "model.onnx")
    message = rf"model.onnx: w\d+ has 16 rows, for sequences of {longest} tokens, .*max_model_len is {longest + 1}"
    with pytest.raises(BundleError, match=message):
        check_positions(graph, longest + 1, "model.onnx")


def test_tables_of_other_things_are_left_alone() -> None:
    m = Model()
    check_positions(_read(m.finish(m.embed(WIDTH), WIDTH)), 1000, "model.onnx")

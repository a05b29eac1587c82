"""Tables that a graph computes: their first rows, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from inferencex.formats.errors import BackendError
from inferencex.formats.graph import read_graph
from inferencex.runtime.backends.graph.static_values import StaticValues

FREQUENCIES = np.array([[1.0, 0.1, 0.01]], np.float32)


def _model(
    limit: int = 9, shape: tuple[int, int] = (9, 3), start: int = 0, frequencies: Any = FREQUENCIES
) -> ModelProto:
    constants = {"start": start, "limit": limit, "step": 1}
    initializers = [numpy_helper.from_array(np.asarray(value, np.int64), name) for name, value in constants.items()]
    initializers.append(numpy_helper.from_array(np.array([1], np.int64), "axes"))
    initializers.append(numpy_helper.from_array(frequencies, "frequencies"))
    nodes = [
        helper.make_node("Range", ["start", "limit", "step"], ["positions"]),
        helper.make_node("Cast", ["positions"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["floats", "axes"], ["column"]),
        helper.make_node("Mul", ["column", "frequencies"], ["angles"]),
        helper.make_node("Cos", ["angles"], ["table"]),
    ]
    output = helper.make_tensor_value_info("table", TensorProto.FLOAT, shape)
    graph = helper.make_graph(nodes, "tables", [], [output], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])


def _rows(model: ModelProto, count: int) -> NDArray[Any] | None:
    graph = read_graph(model)

    def nothing(name: str) -> NDArray[Any]:
        raise AssertionError(f"{name} is a constant inside the graph")

    return StaticValues(graph, nothing).rows(graph.outputs[0], count)


@pytest.mark.parametrize("count", [1, 4, 9, 100])
def test_the_first_rows_are_those_of_the_whole_table(count: int) -> None:
    rows = _rows(_model(), count)
    expected = np.cos(np.arange(9)[:, None] * FREQUENCIES.astype(np.float64))
    assert rows is not None and rows.dtype == np.float32
    np.testing.assert_allclose(rows, expected[:count], atol=1e-6)


@pytest.mark.parametrize(
    "model",
    [
        _model(start=1),
        _model(frequencies=FREQUENCIES.astype(np.float64)),
        _model(frequencies=np.ones((9, 3), np.float32)),
    ],
    ids=["another beginning", "float64", "a table of factors"],
)
def test_other_tables_are_left_to_those_who_evaluate_anything(model: ModelProto) -> None:
    assert _rows(model, 4) is None


def test_a_table_that_is_not_as_large_as_the_graph_says_is_refused() -> None:
    with pytest.raises(BackendError, match=r"'table' has rows \[5, 3\], expected \[9, 3\]"):
        _rows(_model(limit=5), 100)
    with pytest.raises(BackendError, match=r"'table' has rows \[9, 3\], expected \[9, 4\]"):
        _rows(_model(shape=(9, 4)), 100)


def test_tables_of_absurd_sizes_are_refused_before_anything_is_computed() -> None:
    with pytest.raises(BackendError, match="'table' would have"):
        _rows(_model(limit=2**40, shape=(2**40, 3)), 2**40)
    rows = _rows(_model(limit=2**40, shape=(2**40, 3)), 5)
    assert rows is not None and rows.shape == (5, 3)

"""Tables of angles, stored as frequencies: the tables they compute are those that would have been stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from inferencex.convert.capture import capture
from inferencex.convert.passes import optimize, rope_angles
from inferencex.convert.passes.rope_angles import RopeAngles, find_angles, store_angles
from inferencex.formats.dtypes import DataType
from inferencex.formats.graph import read_graph
from inferencex.runtime.backends.graph.static_values import StaticValues
from inferencex.runtime.backends.reference.static_values import StaticValues as ReferenceValues
from tests.architectures import zoo

THETA = {"rope_theta": 10000.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
}
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
ROWS = 4096


def _graph(name: str, config: Any, monkeypatch: pytest.MonkeyPatch, *, computed: bool) -> ir.Model:
    monkeypatch.setattr(rope_angles, "SMALLEST_TABLE", 1 << 10 if computed else 1 << 40)
    return optimize(capture(config), max_positions=ROWS).model


def _tables(model: ir.Model) -> list[ir.Value]:
    node = next(node for node in model.graph if node.op_type == "RotaryEmbedding")
    return [value for value in node.inputs[1:3] if value is not None]


def _without_weights(model: ir.Model) -> ir.Model:
    """Return a graph of the nodes that compute tables alone."""
    tables = _tables(model)
    wanted: set[ir.Node] = set()
    stack = [value.producer() for value in tables]
    while stack:
        node = stack.pop()
        if node is not None and node not in wanted:
            wanted.add(node)
            stack += [value.producer() for value in node.inputs if value is not None]
    nodes = [node for node in model.graph if node in wanted]
    constants = {v for node in nodes for v in node.inputs if v is not None and v.is_initializer()}
    model.graph.remove(list(model.graph))
    model.graph.initializers.clear()
    graph = ir.Graph([], tables, nodes=nodes, initializers=list(constants), opset_imports={"": 23}, name="tables")
    return ir.Model(graph, ir_version=11)


@pytest.mark.parametrize("partial", [False, True], ids=["whole", "partial"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_backend_computes_the_tables(variant: str, partial: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = VARIANTS[variant] | THETA
    if partial:
        parameters |= {"partial_rotary_factor": 0.5}
    config = zoo.tiny_config("llama" if not partial else "stablelm", rope_parameters=parameters, **SIZES)
    config.max_position_embeddings = ROWS
    stored = [value.const_value for value in _tables(_graph(variant, config, monkeypatch, computed=False))]
    expected = [tensor.numpy() for tensor in stored if tensor is not None]
    assert [table.shape for table in expected] == [(ROWS, 4 if partial else 8)] * 2
    model = _graph(variant, config, monkeypatch, computed=True)
    values = ReferenceValues(model.graph, keep=False)
    for value, table in zip(_tables(model), expected, strict=True):
        np.testing.assert_array_equal(values.get(str(value.name)).numpy(), table)  # the converter's own arithmetic
        assert values.is_kept(str(value.name))
    proto = ir.serde.serialize_model(_without_weights(model))
    onnx.checker.check_model(proto, full_check=True)
    for result, table in zip(ReferenceEvaluator(proto).run(None, {}), expected, strict=True):
        np.testing.assert_allclose(result, table, atol=1e-6, rtol=0)
    graph = read_graph(proto)
    static = StaticValues(graph, _no_tensor)
    for output, table in zip(graph.outputs, expected, strict=True):
        for count in (1, 5, ROWS, 2 * ROWS):
            rows = static.rows(output, count)
            assert rows is not None and rows.dtype == np.float32 and rows.shape == table[:count].shape
            np.testing.assert_allclose(rows, table[:count], atol=1e-6, rtol=0)


def _no_tensor(name: str) -> NDArray[Any]:
    raise AssertionError(f"{name} is read from a weight file")


def test_angles_are_right_up_to_the_last_of_many_positions() -> None:
    frequencies = (1.0 / 10000.0 ** (np.arange(0, 128, 2) / 128)).astype(np.float32)[None]
    table = RopeAngles("Sin", frequencies, 1.0).table(131072).numpy()
    positions = np.arange(131072, dtype=np.float32)[:, None]
    exact = np.sin((positions * frequencies).astype(np.float64))  # of the float32 angles, which models compute
    np.testing.assert_allclose(table, exact, atol=2e-7, rtol=0)
    np.testing.assert_allclose(np.sin(positions * frequencies), table, atol=1e-6, rtol=0)


@pytest.mark.parametrize("spoil", ["values", "angles"])
def test_a_table_that_is_something_else_is_kept(spoil: str) -> None:
    angles = torch.arange(300.0)[:, None] * torch.tensor([[1.0, 0.5, 0.1]])
    table = angles.cos()
    assert find_angles("Cos", table, 1.0, [angles]) is not None
    if spoil == "values":
        table[250, 1] += 1e-4
    else:
        angles[200:] *= 1.01  # frequencies that depend on the position
        table = angles.cos()
    assert find_angles("Cos", table, 1.0, [angles]) is None


def test_small_tables_stay() -> None:
    config = zoo.tiny_config("llama", **SIZES)
    model = optimize(capture(config), max_positions=32).model
    assert all(value.const_value is not None for value in _tables(model))
    assert store_angles(model) == 0


def test_the_frequencies_are_all_that_a_bundle_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _graph("default", zoo.tiny_config("llama", **SIZES), monkeypatch, computed=True)
    held = {name: value for name, value in model.graph.initializers.items() if name.startswith("rope")}
    assert list(held) == ["rope_frequencies.0"]
    assert held["rope_frequencies.0"].shape == [1, 8]
    assert DataType(int(held["rope_frequencies.0"].dtype or 0)) is DataType.FLOAT

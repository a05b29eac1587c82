"""Nodes that their operators do not allow, and sizes that no machine has, are refused in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from inferencex.formats.dialect.schemas import DOMAIN
from inferencex.formats.errors import BackendError
from inferencex.formats.graph import Graph, Node, read_graph
from inferencex.runtime.backends.cpu.lowering import LoweredProgram, LoweringOptions, check_nodes, lower_graph
from inferencex.runtime.backends.cpu.memory_limits import check_memory
from inferencex.runtime.backends.cpu.native import _cpu
from inferencex.runtime.backends.graph.evaluation import evaluate

FEATURES = 8
OPTIONS = LoweringOptions(False, "float32", 64, 4, 64, 16, 4)


def _graph(*nodes: onnx.NodeProto, logits: str = "y") -> Graph:
    """Return token_ids -> Gather `x` [tokens, 8] -> Gather `r` [rows, 8], and the nodes behind."""
    table = onnx.numpy_helper.from_array(np.zeros((5, FEATURES), "f4"), "table")
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, [size])
        for name, size in (("token_ids", "tokens"), ("logit_rows", "rows"))
    ]
    output = helper.make_tensor_value_info(logits, TensorProto.FLOAT, ["rows", FEATURES])
    first = [helper.make_node("Gather", ["table", "token_ids"], ["x"], axis=0)]
    first.append(helper.make_node("Gather", ["x", "logit_rows"], ["r"], axis=0))
    graph = helper.make_graph([*first, *nodes], "test", inputs, [output], [table])
    return read_graph(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)]))


def _lower(graph: Graph) -> LoweredProgram:
    def nothing(name: str) -> NDArray[Any]:
        raise AssertionError(f"{name} is a constant inside the graph")

    return lower_graph(graph, nothing, OPTIONS)


def _node(op_type: str, inputs: list[str], domain: str = "", outputs: int = 1, **attributes: Any) -> onnx.NodeProto:
    names = [f"y{i}" if i else "y" for i in range(outputs)]
    return helper.make_node(op_type, inputs, names, domain=domain, **attributes)


_LOOP = helper.make_node("Loop", ["", "", "r"], ["y"], body=helper.make_graph([], "body", [], []))


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (_node("Gemm", ["r"]), "Gemm 'y' has 1 inputs, expected 2 to 3"),
        (_node("Gemm", ["", "table"]), "Gemm 'y' lacks its input 0"),
        (_node("Abs", ["r", "r"]), "has 2 inputs, expected 1"),
        (_node("Abs", ["r"], outputs=2), "has 2 outputs, expected 1"),
        (_node("Softmax", ["r"], axis=0.5), "the attribute axis is FLOAT, expected INT"),
        (_node("Concat", ["r", "r"]), "lacks the attribute axis"),
        (_node("Attention", ["r", "r", "r"], DOMAIN, layer=0, num_heads=1), "lacks the attribute num_kv_heads"),
        (_node("AddRMSNormalization", ["r", "r"], DOMAIN), "has 2 inputs, expected 3"),
        (_LOOP, "Loop 'y' holds a graph"),
    ],
)
def test_malformed_nodes(node: onnx.NodeProto, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        check_nodes(_graph(node))


def test_optional_inputs_and_unknown_operators_are_well_formed() -> None:
    check_nodes(_graph(_node("Clip", ["r", "", ""])))
    check_nodes(_graph(_node("NoSuchOperator", ["r", ""], outputs=3, axis=0.5)))


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([_node("Abs", ["x"])], r"the logits are f32 \[tokens, 8\]; expected f32 \[rows, vocab\]"),
        ([_node("Abs", ["token_ids"])], r"the logits are i64 \[tokens\]"),
        ([_node("AddRMSNormalization", ["r", "x", "table"], DOMAIN)], "AddRMSNormalization 'y'"),
        ([_node("Experts", ["r", "r", "r", "table", "table"], DOMAIN, activation="silu")], "Experts 'y'"),
    ],
)
def test_operands_that_do_not_go_together(nodes: list[onnx.NodeProto], message: str) -> None:
    with pytest.raises(BackendError, match=message):
        _lower(_graph(*nodes))


def _constant_node(op_type: str, **attributes: Any) -> Node:
    return Node("n", op_type, "", (), (), None, helper.make_node(op_type, [], ["y"], **attributes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("op_type", "inputs"),
    [
        ("Range", [np.array(0), np.array(2**60), np.array(1)]),
        ("ConstantOfShape", [np.array([2**30, 2**30])]),
        ("Expand", [np.zeros(1), np.array([2**40])]),
        ("Tile", [np.zeros(4), np.array([2**40])]),
        ("Pad", [np.zeros(4), np.array([0, 2**40])]),
        ("OneHot", [np.zeros(4, int), np.array(2**40), np.array([0, 1])]),
        ("Add", [np.zeros((2**15, 1)), np.zeros((1, 2**15))]),
        ("MatMul", [np.zeros((2**15, 1)), np.zeros((1, 2**15))]),
    ],
)
def test_little_does_not_become_huge(op_type: str, inputs: list[NDArray[Any]]) -> None:
    with pytest.raises(BackendError, match=rf"{op_type} .* would make \d+ elements; the limit is"):
        evaluate(_constant_node(op_type), inputs)


def test_steps_that_no_memory_holds() -> None:
    lowered = _lower(_graph(_node("Abs", ["r"])))
    needed = lowered.memory.arena_bytes
    check_memory(lowered, OPTIONS, 100, available=needed)
    with pytest.raises(BackendError, match=f"a step of 64 tokens takes {needed} bytes, and this machine has"):
        check_memory(lowered, OPTIONS, 100, available=needed - 1)
    with pytest.raises(BackendError, match="an operand of shape"):
        check_memory(lowered, OPTIONS, 100, available=1000)
    with pytest.raises(BackendError, match="the KV cache takes 68719476736 bytes, 1073741824 for each of 16 blocks"):
        check_memory(lowered, OPTIONS, 1 << 30, available=8 << 30)


@pytest.mark.parametrize(("features", "group"), [(0, 32), (64, 0), (-1, -1), (2**62, 32)])
def test_rows_that_cannot_be_quantized(features: int, group: int) -> None:
    with pytest.raises(_cpu.BlueprintError, match="are not quantized in groups of"):
        _cpu.block_layout(features, group)

"""Which inputs are shared, and when nothing may absorb their factors."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from inferencex.convert.calibrate.blocks import cut_blocks
from inferencex.convert.calibrate.data import CalibrationOptions, fitting_length
from inferencex.convert.calibrate.sharing import SharedInput, shared_inputs
from inferencex.convert.passes.editing import WEIGHT
from inferencex.formats.errors import OptionError

_WIDTH = 4


def _weight(name: str, *shape: int) -> ir.Value:
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
    value.meta[WEIGHT] = name
    return value


def _node(op_type: str, inputs: list[ir.Value], name: str, shape: tuple[int | str, ...], **attributes: int) -> ir.Node:
    node = ir.node(op_type, inputs, attributes)
    node.outputs[0].name = name
    node.outputs[0].shape = ir.Shape(shape)
    return node


def _model(nodes: list[ir.Node], inputs: list[ir.Value], weights: list[ir.Value]) -> ir.Model:
    graph = ir.Graph(inputs, [nodes[-1].outputs[0]], nodes=nodes, initializers=weights, opset_imports={"": 23})
    return ir.Model(graph, ir_version=10)


def _input() -> ir.Value:
    return ir.Value(name="x", shape=ir.Shape(("T", _WIDTH)), type=ir.TensorType(ir.DataType.FLOAT))


def _found(model: ir.Model, *quantized: str) -> dict[str, SharedInput]:
    return {one.value: one for one in shared_inputs(model, quantized)}


@pytest.mark.parametrize("moved", [False, True])
def test_a_reader_behind_a_move_keeps_a_norm_from_absorbing(moved: bool) -> None:
    x, scale = _input(), _weight("scale", _WIDTH)
    norm = _node("RMSNormalization", [x, scale], "n", ("T", _WIDTH))
    first = _node("Gemm", [norm.outputs[0], _weight("w1", 6, _WIDTH)], "a", ("T", 6), transB=1)
    rows = ir.Value(name="logit_rows", shape=ir.Shape(("R",)), type=ir.TensorType(ir.DataType.INT64))
    moves = [_node("Gather", [norm.outputs[0], rows], "p", ("R", _WIDTH), axis=0)] if moved else []
    second = _node("Gemm", [[norm, *moves][-1].outputs[0], _weight("w2", 6, _WIDTH)], "b", ("R", 6), transB=1)
    nodes = [norm, first, *moves, second]
    weights = [scale, first.inputs[1], second.inputs[1]]
    found = _found(_model(nodes, [x, rows], weights), "w1", "w2")
    assert (found["n"].absorber is None) == moved
    if not moved:
        assert found["n"].readers == ("w1", "w2")
        absorber = found["n"].absorber
        assert absorber is not None and absorber.tensors == ("scale",)
        np.testing.assert_array_equal(absorber.rows, np.arange(_WIDTH))


def test_a_weight_of_two_linears_has_no_input_of_its_own() -> None:
    x, weight = _input(), _weight("w", _WIDTH, _WIDTH)
    first = _node("Gemm", [x, weight], "a", ("T", _WIDTH), transB=1)
    relu = _node("Relu", [first.outputs[0]], "r", ("T", _WIDTH))
    second = _node("Gemm", [relu.outputs[0], weight], "b", ("T", _WIDTH), transB=1)
    assert _found(_model([first, relu, second], [x], [weight]), "w") == {}


def test_a_graph_without_attention_is_one_block() -> None:
    x, weight = _input(), _weight("w", 6, _WIDTH)
    linear = _node("Gemm", [x, weight], "a", ("T", 6), transB=1)
    model = _model([linear], [x], [weight])
    shared = shared_inputs(model, {"w"})
    (block,) = cut_blocks(model.graph, shared)
    assert [len(stage.shared) for stage in block.stages] == [1, 0]


def test_windows_fit_the_positions_of_a_model() -> None:
    assert fitting_length(None, 10) is None
    assert fitting_length(CalibrationOptions("random"), 2048) == CalibrationOptions("random")
    shorter = fitting_length(CalibrationOptions("random"), 256)
    assert shorter is not None and shorter.length == 256
    with pytest.raises(OptionError, match="--calibration-length 300 is more than the 256 positions"):
        fitting_length(CalibrationOptions("random", length=300), 256)

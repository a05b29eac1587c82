from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor

from inferencex.convert.passes.editing import constant_of, is_weight
from inferencex.convert.passes.weights import combine, expression_of, fold_weights, mark_parameters
from tests.convert.passes.graphs import TOKENS, Builder, assert_equal, text, types


class _Loads:
    """Parameters that tell which of them were asked for."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors, self.asked = tensors, list[str]()

    def __call__(self, name: str) -> Tensor:
        self.asked.append(name)
        return self.tensors[name]


def test_nothing_is_loaded_until_an_expression_is_evaluated() -> None:
    b = Builder()
    x, a, c = b.input("x", ["tokens", 4]), b.parameter("a", 4), b.parameter("c", 4)
    y = b.node("Mul", x, b.node("Add", a, b.constant(1.0)))
    model = b.model(b.node("Mul", y, b.node("Exp", c)))
    feeds = {"x": b.random(TOKENS, 4)}
    expected = b.evaluate(model, feeds)
    assert fold_weights(model) == 2
    assert types(model) == {"Mul": 2}
    weights = [v for v in model.graph.initializers.values() if is_weight(v)]
    assert len(weights) == 2 and all(v.const_value is None for v in weights)
    loads = _Loads(b.parameters)
    expression_of(weights[0]).evaluate(loads)
    assert loads.asked == ["a"]
    assert_equal(b.evaluate(model, feeds), expected)


MOVES = {
    "Transpose": lambda b, w: b.node("Transpose", w, perm=[1, 0]),
    "Reshape": lambda b, w: b.node("Reshape", w, b.constant([2, 12])),
    "Slice": lambda b, w: b.node("Slice", w, b.constant([1]), b.constant([3]), b.constant([1])),
    "Squeeze": lambda b, w: b.node("Squeeze", b.node("Unsqueeze", w, b.constant([0])), b.constant([0])),
    "Concat": lambda b, w: b.node("Concat", w, w, axis=0),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_moves_keep_the_stored_dtype_and_bits(move: str, dtype: torch.dtype) -> None:
    b = Builder()
    weight = b.parameter("w", 4, 6, dtype=dtype)
    moved = MOVES[move](b, weight)
    model = b.model(b.node("Add", moved, b.input("x", [1])))
    fold_weights(model)
    (value,) = [v for v in model.graph.initializers.values() if is_weight(v)]
    result = expression_of(value).evaluate(b.parameters.__getitem__)
    assert expression_of(value).keeps_dtype
    assert result.dtype == dtype
    assert value.shape is not None and list(result.shape) == list(value.shape)
    assert set(result.float().flatten().tolist()) <= set(b.parameters["w"].float().flatten().tolist())


def test_arithmetic_is_float32() -> None:
    b = Builder()
    weight = b.parameter("w", 64, dtype=torch.bfloat16)
    model = b.model(b.node("Mul", b.node("Add", weight, b.constant(1.0)), b.input("x", [1])))
    fold_weights(model)
    (value,) = [v for v in model.graph.initializers.values() if is_weight(v)]
    result = expression_of(value).evaluate(b.parameters.__getitem__)
    assert result.dtype == torch.float32
    assert torch.equal(result, b.parameters["w"].float() + 1.0)
    assert not torch.equal(result, (b.parameters["w"] + 1.0).float())  # what bfloat16 would have given


@pytest.mark.parametrize("other", [torch.float32, torch.float16])
def test_parts_of_different_dtypes_meet_where_no_number_changes(other: torch.dtype) -> None:
    b = Builder()
    parts = [b.parameter("a", 2, 3, dtype=torch.bfloat16), b.parameter("c", 2, 3, dtype=other)]
    model = b.model(b.node("Mul", b.node("Concat", *parts, axis=0), b.input("x", [1])))
    fold_weights(model)
    (value,) = [v for v in model.graph.initializers.values() if is_weight(v)]
    result = expression_of(value).evaluate(b.parameters.__getitem__)
    assert result.dtype == torch.float32
    assert torch.equal(result, torch.cat([b.parameters["a"].float(), b.parameters["c"].float()]))


def test_every_output_of_a_split_parameter_is_one_initializer() -> None:
    b = Builder()
    q, k = b.nodes("Split", b.parameter("qk", 6, 4), b.constant([4, 2]), axis=0, outputs=2)
    x = b.input("x", ["tokens", 4])
    model = b.model(b.node("Gemm", x, q, transB=1), b.node("Gemm", x, k, transB=1))
    feeds = {"x": b.random(TOKENS, 4)}
    expected = b.evaluate(model, feeds)
    fold_weights(model)
    assert types(model) == {"Gemm": 2}
    assert sorted(list(v.shape or []) for v in model.graph.initializers.values() if is_weight(v)) == [[2, 4], [4, 4]]
    assert_equal(b.evaluate(model, feeds), expected)


def test_what_reads_the_input_stays() -> None:
    b = Builder()
    x = b.input("x", ["tokens", 4])
    model = b.model(b.node("Mul", b.node("Add", x, b.parameter("w", 4)), b.constant(2.0)))
    before = text(model)
    assert fold_weights(model) == 0
    assert text(model) == before


def test_weights_are_no_constants() -> None:
    b = Builder()
    weight, number = b.parameter("w", 4), b.constant(2.0)
    assert constant_of(weight) is None
    assert constant_of(number) == np.float32(2.0)


def test_combining_runs_shared_nodes_once() -> None:
    b = Builder()
    shared = b.node("Add", b.parameter("w", 4), b.constant(1.0))
    one, other = b.node("Exp", shared), b.node("Neg", shared)
    model = b.model(b.node("Mul", one, b.input("x", [1])), b.node("Mul", other, b.graph.inputs[0]))
    fold_weights(model)
    parts = [expression_of(v) for node in model.graph for v in node.inputs if v is not None and is_weight(v)]
    joined = ir.node("Concat", [ir.Value(name=part.output) for part in parts], {"axis": 0})
    joined.outputs[0].name = "joined"
    both = combine("joined", parts, [joined])
    assert [node.op_type for node in both.nodes] == ["Add", "Exp", "Neg", "Concat"]
    assert both.parameters == ("w",)
    plus_one = b.parameters["w"] + 1
    assert torch.equal(both.evaluate(b.parameters.__getitem__), torch.cat([plus_one.exp(), -plus_one]))


def test_marking_parameters_follows_ties() -> None:
    b = Builder()
    for name in ("first", "second", "buffer"):
        b.parameter(name, 2)
        del b.graph.initializers[name].meta["inferencex.weight"]
    b.graph.initializers["buffer"].const_value = ir.tensor(np.ones(2, np.float32), name="buffer")
    x = b.input("x", [2])
    y = x
    for name in ("second", "first", "buffer"):
        y = b.node("Add", y, b.graph.initializers[name])
    b.graph.outputs.append(y)
    mark_parameters(b.graph, {"first", "second"}, {"second": "first"})
    assert set(b.graph.initializers) == {"first", "buffer"}
    assert is_weight(b.graph.initializers["first"]) and not is_weight(b.graph.initializers["buffer"])
    assert [str(node.inputs[1].name) for node in b.graph if node.inputs[1] is not None] == ["first", "first", "buffer"]


def test_a_tied_parameter_seen_alone_takes_its_first_name() -> None:
    b = Builder()
    b.parameter("second", 2)
    b.graph.outputs.append(b.node("Add", b.input("x", [2]), b.graph.initializers["second"]))
    mark_parameters(b.graph, {"second"}, {"second": "first"})
    assert expression_of(b.graph.initializers["first"]).parameters == ("first",)

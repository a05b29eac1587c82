"""Which parameters a weight is recorded to be made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from inferencex.convert.origins import origin_of
from inferencex.convert.passes.weights import WeightExpression
from inferencex.formats.bundle.origins import WeightPart

SHAPES = {"q": (8, 4), "k": (2, 4), "norm": (4,), "qkv": (12, 4), "experts": (3, 8, 4)}


def _origin(parameters: Sequence[str], *nodes: ir.Node, constants: dict[str, torch.Tensor] | None = None) -> Any:
    output = str(nodes[-1].outputs[0].name) if nodes else parameters[0]
    expression = WeightExpression(tuple(parameters), output, nodes, constants or {})
    return origin_of(expression, SHAPES.__getitem__)


def _node(op_type: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> ir.Node:
    made = [ir.Value(name=name) for name in outputs]
    return ir.node(op_type, [ir.Value(name=name) for name in inputs], attributes, outputs=made)


def test_a_parameter_as_it_is() -> None:
    assert _origin(["q"]).parts == (WeightPart("q", 0, 8),)
    assert _origin(["experts"]).parts == (WeightPart("experts", 0, 3),)


def test_merged() -> None:
    assert _origin(["q", "k"], _node("Concat", ["q", "k"], ["y"], axis=0)).parts == (
        WeightPart("q", 0, 8),
        WeightPart("k", 0, 2),
    )


def test_a_part_of_what_is_merged() -> None:
    split = _node("Split", ["qkv", "sizes"], ["a", "b", "c"], axis=0)
    origin = _origin(
        ["qkv"], split, _node("Concat", ["c", "a"], ["y"], axis=0), constants={"sizes": torch.tensor([6, 2, 4])}
    )
    assert origin.parts == (WeightPart("qkv", 8, 4), WeightPart("qkv", 0, 6))
    constants = {name: torch.tensor([value]) for name, value in (("from", 2), ("to", 2**60), ("axes", 0))}
    rows = _node("Slice", ["qkv", "from", "to", "axes"], ["y"])
    assert _origin(["qkv"], rows, constants=constants).parts == (WeightPart("qkv", 2, 10),)


def test_transposed() -> None:
    assert _origin(["q"], _node("Transpose", ["q"], ["y"], perm=[1, 0])).parts == (WeightPart("q", 0, 4, True),)
    swap = _node("Transpose", ["experts"], ["y"], perm=[0, 2, 1])
    assert _origin(["experts"], swap).parts == (WeightPart("experts", 0, 3, True),)


def test_added() -> None:
    for inputs in (["norm", "one"], ["one", "norm"]):
        origin = _origin(["norm"], _node("Add", inputs, ["y"]), constants={"one": torch.tensor(1.0)})
        assert origin.parts == (WeightPart("norm", 0, 4, False, 1.0),)


def test_what_rows_cannot_describe_is_named() -> None:
    multiplied = _origin(["norm"], _node("Mul", ["norm", "two"], ["y"]), constants={"two": torch.tensor(2.0)})
    assert (multiplied.parts, multiplied.computed_by) == ((), ("Mul",))
    columns = _origin(["q", "k"], _node("Concat", ["q", "k"], ["y"], axis=1))
    assert (columns.parts, columns.computed_by) == ((), ("Concat",))
    vector = _origin(["norm"], _node("Add", ["norm", "many"], ["y"]), constants={"many": torch.arange(4.0)})
    assert (vector.parts, vector.computed_by) == ((), ("Add",))

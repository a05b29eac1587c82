"""Small graphs written by hand, and their execution by `onnx.reference`: what a pass must not change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
import torch
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from inferencex.convert.passes.editing import WEIGHT, is_weight
from inferencex.convert.passes.weights import WeightExpression, expression_of
from inferencex.formats import dialect

Array = NDArray[Any]
Shape = Sequence[int | str]
TOKENS = 7  # what the symbolic dimension `tokens` is when a graph is executed


class Builder:
    """Grows a graph node by node; shapes that are not given are inferred."""

    def __init__(self, seed: int = 0) -> None:
        dialect.register()
        opsets = {"": dialect.OPSET, dialect.DOMAIN: dialect.VERSION}
        self.graph = ir.Graph([], [], nodes=[], opset_imports=opsets, name="test")
        self.rng = np.random.default_rng(seed)
        self.parameters: dict[str, torch.Tensor] = {}

    def random(self, *shape: int) -> Array:
        return self.rng.standard_normal(shape).astype(np.float32)

    def input(self, name: str, shape: Shape, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        self.graph.inputs.append(value)
        return value

    def parameter(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> ir.Value:
        """A weight of the model: it has an expression and no value."""
        self.parameters[name] = torch.from_numpy(self.random(*shape)).to(dtype)
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
        value.meta[WEIGHT] = WeightExpression((name,), name)
        self.graph.initializers[name] = value
        return value

    def constant(self, value: float | np.floating[Any] | Sequence[int] | Array, name: str = "") -> ir.Value:
        array = value if isinstance(value, np.ndarray) else np.asarray(value)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        name = name or f"c{len(self.graph.initializers)}"
        tensor = ir.tensor(array, name=name)
        made = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
        self.graph.initializers[name] = made
        return made

    def nodes(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        outputs: int = 1,
        domain: str = "",
        shape: Shape | None = None,
        dtype: ir.DataType | None = None,
        **attributes: Any,
    ) -> list[ir.Value]:
        values = [ir.Value(name=f"{op_type}_{len(self.graph)}_{i}") for i in range(outputs)]
        node = ir.node(op_type, list(inputs), attributes, domain=domain, outputs=values)
        self.graph.append(node)
        if shape is not None:
            values[0].shape = ir.Shape(shape)
            values[0].type = ir.TensorType(dtype or ir.DataType.FLOAT)
        return values

    def node(self, op_type: str, *inputs: ir.Value | None, **kwargs: Any) -> ir.Value:
        return self.nodes(op_type, *inputs, **kwargs)[0]

    def model(self, *outputs: ir.Value) -> ir.Model:
        self.graph.outputs.extend(outputs)
        model = ir.Model(self.graph, ir_version=11)
        common.ShapeInferencePass()(model)
        return model

    def evaluate(self, model: ir.Model, feeds: Mapping[str, Array]) -> list[Array]:
        return evaluate(model, feeds, self.parameters)


def evaluate(model: ir.Model, feeds: Mapping[str, Array], parameters: Mapping[str, torch.Tensor]) -> list[Array]:
    """Execute a graph with `onnx.reference`, its weights computed from `parameters`."""
    weights = [v for v in model.graph.initializers.values() if is_weight(v)]
    for value in weights:
        array = expression_of(value).evaluate(parameters.__getitem__).to(torch.float32).contiguous().numpy()
        assert value.shape is not None
        assert list(array.shape) == list(value.shape), f"{value.name} is {array.shape}, declared {value.shape}"
        value.const_value = ir.tensor(array, name=value.name)
    try:
        proto = ir.serde.serialize_model(model)
    finally:
        for value in weights:
            value.const_value = None
    return [np.asarray(y) for y in ReferenceEvaluator(proto, new_ops=dialect.new_ops()).run(None, dict(feeds))]


def types(model: ir.Model) -> dict[str, int]:
    """Count operators by type."""
    return dict(Counter(node.op_type for node in model.graph))


def only(model: ir.Model, op_type: str) -> ir.Node:
    """Return the one node of a type."""
    (node,) = [node for node in model.graph if node.op_type == op_type]
    return node


def text(model: ir.Model) -> str:
    """Return the graph as text, to compare it before and after."""
    return "\n".join([*(str(v) for v in model.graph.inputs), *(str(node) for node in model.graph)])


def assert_equal(got: Sequence[Array], expected: Sequence[Array], tolerance: float = 1e-5) -> None:
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        np.testing.assert_allclose(one, other, atol=tolerance, rtol=tolerance)

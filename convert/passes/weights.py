"""Fold what depends on parameters alone into the parameters, without loading any.

`1 + weight` of a norm, the transposed weight of a linear, the slice of a fused projection: each becomes one
initializer that carries the expression which computes it. It is evaluated when the tensor is written, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from inferencex.convert.passes.editing import WEIGHT, constant_of, drop_dead, static_dims
from inferencex.runtime.backends.reference import interpreter

Loader = Callable[[str], Tensor]

# These move numbers and never change them, so the stored dtype survives.
_MOVES = {
    "Transpose",
    "Reshape",
    "Slice",
    "Concat",
    "Split",
    "Squeeze",
    "Unsqueeze",
    "Identity",
    "Gather",
    "Expand",
    "Flatten",
}

_INTEGERS = {torch.bool: ir.DataType.BOOL, torch.int64: ir.DataType.INT64, torch.int32: ir.DataType.INT32}


@dataclass(frozen=True)
class WeightExpression:
    """How to compute one initializer from source parameters.

    parameters: names of the source parameters it reads.
    nodes:      the nodes to execute, in order; empty for a parameter as it is.
    output:     name of the value that is the result.
    constants:  other values the nodes read, by name.
    """

    parameters: tuple[str, ...]
    output: str
    nodes: tuple[ir.Node, ...] = ()
    constants: dict[str, Tensor] = field(default_factory=dict)

    @property
    def keeps_dtype(self) -> bool:
        """Whether the result is made of the source's numbers, unchanged."""
        return all(node.op_type in _MOVES for node in self.nodes)

    def evaluate(self, load: Loader) -> Tensor:
        """Compute the tensor: in its source dtype if the expression only moves numbers, else in float32."""
        environment: dict[str, Tensor] = dict(self.constants)
        for name in self.parameters:
            tensor = load(name)
            floating = tensor.is_floating_point() and not self.keeps_dtype
            environment[name] = tensor.to(torch.float32) if floating else tensor
        dtypes = {environment[name].dtype for name in self.parameters}
        if len(dtypes) > 1:
            widest = max(dtypes, key=lambda dtype: (dtype.is_floating_point, dtype.itemsize))
            if {torch.float16, torch.bfloat16} <= dtypes:  # neither holds the other's numbers
                widest = torch.float32
            for name in self.parameters:
                environment[name] = environment[name].to(widest)
        interpreter.run_nodes(self.nodes, environment)
        return environment[self.output]


def expression_of(value: ir.Value) -> WeightExpression:
    """Return the expression of an initializer for which `is_weight` holds."""
    expression = value.meta[WEIGHT]
    assert isinstance(expression, WeightExpression)
    return expression


def combine(output: str, parts: list[WeightExpression], nodes: list[ir.Node]) -> WeightExpression:
    """Make the expression that computes `parts` and then `nodes`."""
    seen: dict[int, ir.Node] = {}
    constants: dict[str, Tensor] = {}
    parameters: dict[str, None] = {}
    for part in parts:
        constants.update(part.constants)
        parameters.update(dict.fromkeys(part.parameters))
        seen.update({id(node): node for node in part.nodes})
    seen.update({id(node): node for node in nodes})
    return WeightExpression(tuple(parameters), output, tuple(seen.values()), constants)


def mark_parameters(graph: ir.Graph, names: set[str], aliases: dict[str, str]) -> None:
    """Turn the initializers called `names` into parameters that hold an expression and no value.

    A tied parameter becomes the one it is tied to, `aliases[name]`, so that it is stored once.
    """
    for name, value in list(graph.initializers.items()):
        if name not in names:
            continue
        value.const_value = None
        first = aliases.get(name, name)
        if first != name:
            del graph.initializers[name]
            if first in graph.initializers:
                value.replace_all_uses_with(graph.initializers[first])
                continue
            value.name = first
            graph.initializers[first] = value
        value.meta[WEIGHT] = WeightExpression((first,), first)


def fold_weights(model: ir.Model) -> int:
    """Replace every node that reads only parameters and constants by an initializer; returns how many."""
    graph = model.graph
    folded = 0
    for node in list(graph):
        sources = [v for v in node.inputs if v is not None and WEIGHT in v.meta]
        others = [v for v in node.inputs if v is not None and WEIGHT not in v.meta]
        if not sources or any(constant_of(v) is None for v in others) or any(v.shape is None for v in sources):
            continue
        constants = {str(v.name): interpreter.to_tensor(_tensor(v)) for v in others}
        parts = [expression_of(v) for v in sources]
        results = _on_meta(node)
        if results is None:
            continue
        first = parts[0].parameters[0]
        names = [f"{first}.{output.name}" for output in node.outputs]
        alone = _detached(node, names)
        for output, name, meta in zip(node.outputs, names, results, strict=True):
            combined = combine(name, parts, [alone])
            combined.constants.update(constants)
            kind = ir.DataType.FLOAT if meta.is_floating_point() else _INTEGERS[meta.dtype]
            value = ir.Value(name=name, shape=ir.Shape(list(meta.shape)), type=ir.TensorType(kind))
            value.meta[WEIGHT] = combined
            graph.initializers[name] = value
            output.replace_all_uses_with(value, replace_graph_outputs=True)
        folded += 1
    drop_dead(graph)
    return folded


def _detached(node: ir.Node, outputs: list[str]) -> ir.Node:
    """Copy a node with values that only have names: it outlives the graph it came from."""
    inputs = [None if v is None else ir.Value(name=v.name) for v in node.inputs]
    attributes = {name: a.value for name, a in node.attributes.items()}
    return ir.node(node.op_type, inputs, attributes, domain=node.domain, outputs=[ir.Value(name=n) for n in outputs])


def _tensor(value: ir.Value) -> Any:
    return value.const_value if value.const_value is not None else ir.convenience.get_const_tensor(value)


def _on_meta(node: ir.Node) -> list[Tensor] | None:
    """Find the shapes and dtypes of a node's outputs by running it on meta tensors; None when it cannot be."""
    inputs: list[Tensor | None] = []
    for value in node.inputs:
        if value is not None and WEIGHT in value.meta:
            assert value.dtype is not None
            dtype = next((d for d, kind in _INTEGERS.items() if kind == value.dtype), torch.float32)
            inputs.append(torch.empty(static_dims(value), device="meta", dtype=dtype))
        else:
            inputs.append(None if value is None else interpreter.to_tensor(_tensor(value)))
    try:
        return list(interpreter.run_node(node, inputs))
    except RuntimeError:  # NotImplementedError, of what has no meta kernel, is one
        return None

"""Normalizations, gates and activations: row operations that also quantize what the next linear reads."""

from __future__ import annotations

from collections.abc import Sequence

from inferencex.formats.graph import Node, Value
from inferencex.runtime.backends.cpu.lowering.context import AttributeValue, Lowering
from inferencex.runtime.backends.cpu.lowering.extents import Extent
from inferencex.runtime.backends.cpu.lowering.quantization import (
    allocate_quantized,
    reads_quantized,
    wanted_groups,
)
from inferencex.runtime.backends.cpu.lowering.views import View

# operator -> name of its activation in the native module
_ACTIVATIONS = {"Relu": "relu", "Sigmoid": "sigmoid"}


def lower_norm(lowering: Lowering, node: Node) -> bool:
    """Lower RMSNormalization, LayerNormalization and their fusions with a residual addition, over the last axis."""
    rank = lowering.view(node.inputs[0]).rank
    if node.domain == "" and node.attributes.get_int("axis", -1) % rank != rank - 1:
        return False
    if len(node.outputs) > 1 and not node.op_type.startswith("Add"):
        return False
    name = node.outputs[0].name
    adds = node.op_type.startswith("Add")
    views = [lowering.optional_view(node, place) for place in range(4 if adds else 3)]
    inputs: list[View | None] = [view if view is None else lowering.with_contiguous_rows(view, name) for view in views]
    if node.op_type.endswith("RMSNormalization"):
        inputs = inputs[: 3 if adds else 2]
    x, scale = inputs[0], inputs[2 if adds else 1]
    assert x is not None and scale is not None
    attributes: dict[str, AttributeValue] = {"epsilon": float(node.attributes.get_float("epsilon", 1e-5))}
    if scale.dims != x.dims[-1:]:
        return not adds and node.op_type == "RMSNormalization" and _scaled_behind(lowering, node, x, scale, attributes)
    y, parts = _row_outputs(lowering, node.outputs[0], x.dims, attributes)
    total = None
    if adds and len(node.outputs) > 1 and node.outputs[1].name and _is_used(lowering, node.outputs[1]):
        total = lowering.define(node.outputs[1], "f32", x.dims)
    lowering.emit(node.op_type, name, inputs, [y, total, *parts], **attributes)
    return True


def _scaled_behind(lowering: Lowering, node: Node, x: View, scale: View, attributes: dict[str, AttributeValue]) -> bool:
    """Lower a normalization whose scale is no vector of features: the scale is multiplied afterwards."""
    normed = lowering.allocate("f32", x.dims)
    lowering.emit(node.op_type, node.outputs[0].name, [x, None], [normed, None, None, None, None], **attributes)
    y = lowering.define(node.outputs[0], "f32", x.dims)
    lowering.emit("Mul", node.outputs[0].name, [normed, scale], [y])
    return True


def lower_gated(lowering: Lowering, node: Node) -> bool:
    """Lower a GatedActivation that no linear computes along."""
    x = lowering.with_contiguous_rows(lowering.view(node.inputs[0]), node.outputs[0].name)
    attributes: dict[str, AttributeValue] = {
        "activation": node.attributes.get_string("activation"),
        "layout": node.attributes.get_string("layout", "concat"),
        "alpha": float(node.attributes.get_float("alpha", 1.0)),
        "limit": float(node.attributes.get_float("limit", 0.0)),
    }
    dims = (*x.dims[:-1], Extent(x.dims[-1].coefficient // 2))
    y, parts = _row_outputs(lowering, node.outputs[0], dims, attributes)
    lowering.emit(node.op_type, node.outputs[0].name, [x], [y, *parts], **attributes)
    return True


def lower_activation(lowering: Lowering, node: Node) -> bool:
    """Lower an activation without a gate, where a matrix goes through it."""
    x = lowering.view(node.inputs[0])
    if x.dtype != "f32" or x.rank != 2:
        return False
    if node.op_type == "Gelu":
        activation = "gelu_tanh" if node.attributes.get_string("approximate", "none") == "tanh" else "gelu"
    else:
        activation = _ACTIVATIONS[node.op_type]
    attributes: dict[str, AttributeValue] = {"activation": activation}
    x = lowering.with_contiguous_rows(x, node.outputs[0].name)
    y, parts = _row_outputs(lowering, node.outputs[0], x.dims, attributes)
    lowering.emit("Activation", node.outputs[0].name, [x], [y, *parts], **attributes)
    return True


def _row_outputs(
    lowering: Lowering, value: Value, dims: Sequence[Extent], attributes: dict[str, AttributeValue]
) -> tuple[View | None, tuple[View | None, View | None, View | None]]:
    """Return places for a row operation's result: floats where anyone reads those, and the first quantized form."""
    groups = list(wanted_groups(lowering, value)) if len(dims) == 2 and dims[1].is_constant else []
    parts: tuple[View | None, View | None, View | None] = (None, None, None)
    if groups:
        quantized = allocate_quantized(lowering, dims[0], dims[1].coefficient, groups[0], whole=False)
        lowering.quantized[value.name, str(groups[0])] = quantized
        attributes["group"] = groups[0]
        parts = (quantized.values, quantized.scales, quantized.sums)
    if len(groups) == 1 and not lowering.needs_float(value, lambda user: reads_quantized(lowering, user, value)):
        return None, parts
    return lowering.define(value, "f32", dims), parts


def _is_used(lowering: Lowering, value: Value) -> bool:
    return bool(value.consumers()) or any(value is output for output in lowering.graph.outputs)

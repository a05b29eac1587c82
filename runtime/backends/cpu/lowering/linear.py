"""Linears: integer kernels on quantized activations, or float kernels; a gate behind them is computed along."""

from __future__ import annotations

import numpy as np

from inferencex.formats.graph import Node, Value
from inferencex.runtime.backends.cpu.lowering.context import AttributeValue, Lowering, input_of
from inferencex.runtime.backends.cpu.lowering.extents import Extent, product
from inferencex.runtime.backends.cpu.lowering.quantization import (
    activation_group,
    allocate_quantized,
    integer_weight,
    quantized_input,
    quantized_whole,
    reads_quantized,
    wanted_groups,
)
from inferencex.runtime.backends.cpu.lowering.views import View, constant_view, weight_views
from inferencex.runtime.backends.graph.activation_quantization import activation_quantization
from inferencex.runtime.backends.graph.static_values import PER_CHANNEL, StoredArray, StoredWeight


def gate_of(lowering: Lowering, node: Node) -> Node | None:
    """Return the GatedActivation that alone reads a linear's output, else None."""
    (value,) = node.outputs
    consumers = value.consumers()
    if len(consumers) != 1 or any(value is output for output in lowering.graph.outputs):
        return None
    gate = consumers[0]
    return gate if gate.domain == "inferencex" and gate.op_type == "GatedActivation" else None


def lower_gemm(lowering: Lowering, node: Node) -> bool:
    """Lower `Gemm(x, weight, bias?; transB=1)` with a static weight."""
    attributes = node.attributes
    if node.inputs[1] is None or node.inputs[1] not in lowering.static or not attributes.get_int("transB", 0):
        return False
    if attributes.get_int("transA", 0) or attributes.get_float("alpha", 1.0) != 1.0:
        return False
    weight = lowering.static.weight(node.inputs[1])
    if weight is None:
        array = np.asarray(lowering.static.array(node.inputs[1]), dtype=np.float32)
        lowering.widened.append(node.inputs[1].name)
        weight = StoredWeight("f32", array.shape, StoredArray("f32", array))
    if len(weight.shape) != 2:
        return False
    bias = input_of(node, 2)
    if bias is not None and (bias not in lowering.static or attributes.get_float("beta", 1.0) != 1.0):
        return False
    bias_view = None
    if bias is not None:
        array = np.broadcast_to(np.asarray(lowering.static.array(bias), np.float32).reshape(-1), weight.shape[:1])
        bias_view = constant_view(array, "f32")
    if integer_weight(lowering, node) is not None:
        _lower_integer(lowering, node, weight, bias_view)
    else:
        _lower_float(lowering, node, lowering.view(node.inputs[0]), weight, bias_view)
    return True


def lower_matmul(lowering: Lowering, node: Node) -> bool:
    """Lower a MatMul with a static matrix on the right as a linear."""
    right = node.inputs[1]
    if right is None or right not in lowering.static or len(right.shape or ()) != 2:
        return False
    x = lowering.view(node.inputs[0])
    rows, features = product(x.dims[:-1]), x.dims[-1]
    flat = x.reshaped((rows, features)) or lowering.contiguous(x, node.outputs[0].name).reshaped((rows, features))
    array = np.ascontiguousarray(np.asarray(lowering.static.array(right), dtype=np.float32).T)
    if flat is None or features != Extent(array.shape[1]):
        return False
    if right.producer() is not None:
        lowering.widened.append(right.name)
    y = lowering.allocate("f32", (rows, Extent(array.shape[0])))
    weight = StoredWeight("f32", array.shape, StoredArray("f32", array))
    _emit_float(lowering, node.outputs[0].name, flat, weight, None, y, {})
    result = y.reshaped((*x.dims[:-1], Extent(array.shape[0])))
    assert result is not None, "a contiguous matrix can be reshaped"
    lowering.views[node.outputs[0].name] = result
    return True


def _lower_integer(lowering: Lowering, node: Node, weight: StoredWeight, bias: View | None) -> None:
    value = node.inputs[0]
    assert value is not None
    channels, features = weight.shape
    attributes: dict[str, AttributeValue] = {
        "channels": channels,
        "features": features,
        "group": features if weight.group == PER_CHANNEL else weight.group,
        "bits": weight.multiplied_bits,
        "signed": int(weight.is_signed),
    }
    if weight.format not in ("int4", "int8"):
        attributes["format"] = weight.format
    weight = weight.for_integers()
    explicit = activation_quantization(lowering.static, value)
    if explicit is not None:
        x = quantized_whole(lowering, explicit)
        attributes["whole"] = 1
    else:
        x = quantized_input(lowering, value, activation_group(weight))
    rows = x.values.dims[0]
    inputs = [x.values, x.scales, x.sums, *weight_views(weight), bias]
    gate = gate_of(lowering, node)
    result = node.outputs[0] if gate is None else gate.outputs[0]
    if gate is not None:
        attributes.update(_gate_attributes(gate))
        lowering.absorbed.add(gate.outputs[0].name)
    width = channels if gate is None else channels // 2
    y, parts = _results(lowering, result, rows, width, attributes)
    lowering.emit("IntegerLinear", node.outputs[0].name, inputs, [y, *parts], **attributes)


def _results(
    lowering: Lowering, value: Value, rows: Extent, width: int, attributes: dict[str, AttributeValue]
) -> tuple[View | None, tuple[View | None, View | None, View | None]]:
    """Return places for a linear's result, as floats and quantized for the first linear that wants it so."""
    groups = list(wanted_groups(lowering, value)) if "activation" in attributes else []
    parts: tuple[View | None, View | None, View | None] = (None, None, None)
    if groups:
        quantized = allocate_quantized(lowering, rows, width, groups[0], whole=False)
        lowering.quantized[value.name, str(groups[0])] = quantized
        attributes["out_group"] = groups[0]
        parts = (quantized.values, quantized.scales, quantized.sums)
    if len(groups) == 1 and not lowering.needs_float(value, lambda user: reads_quantized(lowering, user, value)):
        return None, parts
    return lowering.define(value, "f32", (rows, Extent(width))), parts


def _lower_float(lowering: Lowering, node: Node, x: View, weight: StoredWeight, bias: View | None) -> None:
    gate = gate_of(lowering, node)
    attributes: dict[str, AttributeValue] = {}
    value, width = node.outputs[0], weight.shape[0]
    if gate is not None:
        attributes = _gate_attributes(gate)
        lowering.absorbed.add(gate.outputs[0].name)
        value, width = gate.outputs[0], weight.shape[0] // 2
    x = lowering.with_contiguous_rows(x, node.outputs[0].name)
    y = lowering.define(value, "f32", (x.dims[0], Extent(width)))
    _emit_float(lowering, node.outputs[0].name, x, weight, bias, y, attributes)


def _emit_float(
    lowering: Lowering,
    name: str,
    x: View,
    weight: StoredWeight,
    bias: View | None,
    y: View,
    attributes: dict[str, AttributeValue],
) -> None:
    channels, features = weight.shape
    lowering.emit(
        "FloatLinear",
        name,
        [lowering.with_contiguous_rows(x, name), *weight_views(weight), bias],
        [y],
        channels=channels,
        features=features,
        format=weight.format,
        group=features if weight.group == PER_CHANNEL else weight.group,
        signed=int(weight.is_signed),
        **attributes,
    )


def _gate_attributes(gate: Node) -> dict[str, AttributeValue]:
    return {
        "activation": gate.attributes.get_string("activation"),
        "layout": gate.attributes.get_string("layout", "concat"),
        "alpha": float(gate.attributes.get_float("alpha", 1.0)),
        "limit": float(gate.attributes.get_float("limit", 0.0)),
    }

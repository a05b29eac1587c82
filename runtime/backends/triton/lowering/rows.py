"""Operations on rows: normalizations, gates, and routed experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from inferencex.formats.dialect.names import DOMAIN
from inferencex.formats.graph import Node, Value
from inferencex.runtime.backends.triton.kernels.activation import gated_activation, gated_activation_quantized
from inferencex.runtime.backends.triton.kernels.experts import expert_linear, experts
from inferencex.runtime.backends.triton.kernels.norms import normalize
from inferencex.runtime.backends.triton.kernels.quantize_rows import Quantized
from inferencex.runtime.backends.triton.lowering.context import Lowering, input_of
from inferencex.runtime.backends.triton.lowering.program import Values
from inferencex.runtime.backends.triton.lowering.quantization import QuantizationBehind, quantization_behind
from inferencex.runtime.backends.triton.step_inputs import StepInputs


def lower_norm(lowering: Lowering, node: Node) -> bool:
    """Lower RMSNormalization and LayerNormalization over the last axis, with a vector of scales."""
    x_value, scale_value, bias_value = node.inputs[0], input_of(node, 1), input_of(node, 2)
    rank = len(x_value.shape or ()) if x_value is not None else 0
    axis = node.attributes.get_int("axis", -1)
    if rank < 2 or axis % rank != rank - 1 or len([v for v in node.outputs if v.name]) != 1:
        return False
    if scale_value is None or not lowering.is_static(scale_value) or len(scale_value.shape or ()) != 1:
        return False
    if bias_value is not None and not lowering.is_static(bias_value):
        return False
    scale, bias = lowering.constants.float_vector(scale_value), lowering.constants.float_vector(bias_value)
    assert scale is not None
    x, epsilon = lowering.activations(x_value), node.attributes.get_float("epsilon", 1e-5)
    centered = node.op_type == "LayerNormalization"
    behind = quantization_behind(lowering, node.outputs[0])

    def run(values: Values, step: StepInputs) -> tuple[Tensor | None, ...]:
        rows = x(values)
        found = normalize(rows.flatten(0, -2), scale, epsilon, bias=bias, centered=centered, **_quantizing(behind))
        y = None if found.y is None else found.y.view(rows.shape)
        return (y, *_quantized(behind, found.quantized))

    lowering.emit(node, "triton", run, along=() if behind is None else behind.outputs)
    return True


def _quantizing(behind: QuantizationBehind | None) -> dict[str, Any]:
    """Return the options of kernels that quantize what they compute."""
    return {} if behind is None else {"quantization": behind.quantization, "keep": behind.keeps}


def _quantized(behind: QuantizationBehind | None, quantized: Quantized | None) -> Sequence[Tensor]:
    """Return the results that come along."""
    return () if behind is None or quantized is None else behind.results(quantized)


def lower_add_norm(lowering: Lowering, node: Node) -> bool:
    """Lower a normalization with the residual addition in front of it."""
    if any(not lowering.is_static(value) for value in node.inputs[2:] if value is not None):
        return False
    scale = lowering.constants.float_vector(node.inputs[2])
    bias = lowering.constants.float_vector(input_of(node, 3))
    assert scale is not None
    x, residual = lowering.activations(node.inputs[0]), lowering.activations(node.inputs[1])
    epsilon, centered = node.attributes.get_float("epsilon", 1e-5), node.op_type == "AddLayerNormalization"
    behind = quantization_behind(lowering, node.outputs[0])

    def run(values: Values, step: StepInputs) -> tuple[Tensor | None, ...]:
        found = normalize(
            x(values),
            scale,
            epsilon,
            residual=residual(values),
            bias=bias,
            centered=centered,
            **_quantizing(behind),
        )
        own = (found.y, found.total)[: len(node.outputs)]
        return (*own, *_quantized(behind, found.quantized))

    lowering.emit(node, "triton", run, along=() if behind is None else behind.outputs)
    return True


def lower_gate(lowering: Lowering, node: Node) -> bool:
    """Lower a GatedActivation."""
    x, gate = lowering.activations(node.inputs[0]), _gate(node)
    behind = quantization_behind(lowering, node.outputs[0])

    def run(values: Values, step: StepInputs) -> tuple[Tensor | None, ...]:
        rows = x(values)
        if behind is not None:
            quantized, y = gated_activation_quantized(rows, behind.quantization, *gate, keep=behind.keeps)
            return (y, *behind.results(quantized))
        whole = gated_activation(rows.flatten(0, -2), *gate)
        return (whole.view(*rows.shape[:-1], rows.shape[-1] // 2),)

    lowering.emit(node, "triton", run, along=() if behind is None else behind.outputs)
    return True


def expert_stacks(node: Node) -> list[tuple[Value, Value | None]]:
    """Return the stacks of experts' weights that a node multiplies with, each with its biases."""
    places = {(DOMAIN, "Experts"): ((3, 5), (4, 6)), (DOMAIN, "ExpertLinear"): ((2, 3),)}
    found = []
    for place, bias in places.get((node.domain, node.op_type), ()):
        stack = node.inputs[place]
        assert stack is not None
        found.append((stack, input_of(node, bias)))
    return found


def lower_experts(lowering: Lowering, node: Node) -> bool:
    """Lower a layer of gated experts."""
    if any(not lowering.is_static(value) for value in node.inputs[3:] if value is not None):
        return False
    constants, gate = lowering.constants, _gate(node)
    gate_up, down = (constants.linear(stack, bias) for stack, bias in expert_stacks(node))
    x, index, weights = (
        lowering.activations(node.inputs[0]),
        lowering.read(node.inputs[1]),
        lowering.read(node.inputs[2]),
    )

    def run(values: Values, step: StepInputs) -> tuple[Tensor]:
        return (experts(x(values), index(values), weights(values), gate_up, down, *gate),)

    lowering.emit(node, "triton", run)
    return True


def lower_expert_linear(lowering: Lowering, node: Node) -> bool:
    """Lower a linear whose weight is chosen row by row."""
    if any(not lowering.is_static(value) for value in node.inputs[2:] if value is not None):
        return False
    ((stack, bias),) = expert_stacks(node)
    weight = lowering.constants.linear(stack, bias)
    x, index = lowering.activations(node.inputs[0]), lowering.read(node.inputs[1])

    def run(values: Values, step: StepInputs) -> tuple[Tensor]:
        return (expert_linear(x(values), index(values), weight),)

    lowering.emit(node, "triton", run)
    return True


def _gate(node: Node) -> tuple[str, str, float, float]:
    attributes = node.attributes
    return (
        attributes.get_string("activation"),
        attributes.get_string("layout", "concat"),
        attributes.get_float("alpha", 1.0),
        attributes.get_float("limit", 0.0),
    )


HANDLERS = {
    ("", "RMSNormalization"): (lower_norm,),
    ("", "LayerNormalization"): (lower_norm,),
    (DOMAIN, "AddRMSNormalization"): (lower_add_norm,),
    (DOMAIN, "AddLayerNormalization"): (lower_add_norm,),
    (DOMAIN, "GatedActivation"): (lower_gate,),
    (DOMAIN, "Experts"): (lower_experts,),
    (DOMAIN, "ExpertLinear"): (lower_expert_linear,),
}

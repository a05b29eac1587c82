"""Operations on rows: normalizations, gates, and routed experts."""

from __future__ import annotations

from torch import Tensor

from inferencex.formats.dialect.names import DOMAIN
from inferencex.formats.graph import Node
from inferencex.runtime.backends.triton.kernels.activation import gated_activation
from inferencex.runtime.backends.triton.kernels.experts import expert_linear, experts
from inferencex.runtime.backends.triton.kernels.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from inferencex.runtime.backends.triton.lowering.context import Lowering, input_of
from inferencex.runtime.backends.triton.lowering.program import Values
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

    def run(values: Values, step: StepInputs) -> tuple[Tensor]:
        rows = x(values)
        flat = rows.flatten(0, -2)
        y = layer_norm(flat, scale, bias, epsilon) if centered else rms_norm(flat, scale, epsilon)
        return (y.view(rows.shape),)

    lowering.emit(node, "triton", run)
    return True


def lower_add_norm(lowering: Lowering, node: Node) -> bool:
    """Lower a normalization with the residual addition in front of it."""
    if any(not lowering.is_static(value) for value in node.inputs[2:] if value is not None):
        return False
    scale = lowering.constants.float_vector(node.inputs[2])
    bias = lowering.constants.float_vector(input_of(node, 3))
    assert scale is not None
    x, residual = lowering.activations(node.inputs[0]), lowering.activations(node.inputs[1])
    epsilon, centered = node.attributes.get_float("epsilon", 1e-5), node.op_type == "AddLayerNormalization"

    def run(values: Values, step: StepInputs) -> tuple[Tensor, ...]:
        if centered:
            return add_layer_norm(x(values), residual(values), scale, bias, epsilon)
        return add_rms_norm(x(values), residual(values), scale, epsilon)

    lowering.emit(node, "triton", run)
    return True


def lower_gate(lowering: Lowering, node: Node) -> bool:
    """Lower a GatedActivation."""
    x, gate = lowering.activations(node.inputs[0]), _gate(node)

    def run(values: Values, step: StepInputs) -> tuple[Tensor]:
        rows = x(values)
        y = gated_activation(rows.flatten(0, -2), *gate)
        return (y.view(*rows.shape[:-1], rows.shape[-1] // 2),)

    lowering.emit(node, "triton", run)
    return True


def lower_experts(lowering: Lowering, node: Node) -> bool:
    """Lower a layer of gated experts."""
    if any(not lowering.is_static(value) for value in node.inputs[3:] if value is not None):
        return False
    constants, gate = lowering.constants, _gate(node)
    gate_up_value, down_value = node.inputs[3], node.inputs[4]
    assert gate_up_value is not None and down_value is not None
    gate_up = constants.linear(gate_up_value, input_of(node, 5))
    down = constants.linear(down_value, input_of(node, 6))
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
    assert node.inputs[2] is not None
    weight = lowering.constants.linear(node.inputs[2], input_of(node, 3))
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

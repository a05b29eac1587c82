"""Linears, on floats or on activations that the graph quantizes, and lookups in stored tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inferencex.formats.graph import Node, Value
from inferencex.runtime.backends.graph.activation_quantization import ActivationQuantization, activation_quantization
from inferencex.runtime.backends.graph.static_values import PER_CHANNEL, StaticValues
from inferencex.runtime.backends.triton.kernels.linear import linear
from inferencex.runtime.backends.triton.kernels.scaled_linear import scaled_linear
from inferencex.runtime.backends.triton.lowering.context import Lowering, input_of
from inferencex.runtime.backends.triton.lowering.program import Values
from inferencex.runtime.backends.triton.step_inputs import StepInputs
from inferencex.runtime.backends.triton.weights import LinearWeight, plain
from inferencex.runtime.backends.triton.weights.linear_weight import Layout

_MULTIPLIED = {"i8": "int8", "f8e4m3": "f8e4m3"}  # activations -> the weights that they are multiplied with as they are


@dataclass(frozen=True)
class Linear:
    """What a Gemm is lowered to.

    weight, bias: static; the bias may be missing
    explicit:     how the graph quantizes the activations, where they are multiplied as such (W8A8)
    """

    weight: Value
    bias: Value | None
    explicit: ActivationQuantization | None

    @property
    def layout(self) -> Layout:
        """The layout of the weight."""
        return "panels" if self.explicit is None else "rows"


def linear_of(static: StaticValues, node: Node) -> Linear | None:
    """Return what `Gemm(x, weight, bias?; transB=1)` is lowered to; None for others, and for weights of the step."""
    attributes, weight, bias = node.attributes, input_of(node, 1), input_of(node, 2)
    if (node.domain, node.op_type) != ("", "Gemm") or not attributes.get_int("transB", 0):
        return None
    if weight is None or weight not in static:
        return None
    if attributes.get_int("transA", 0) or attributes.get_float("alpha", 1.0) != 1.0:
        return None
    if bias is not None and (bias not in static or attributes.get_float("beta", 1.0) != 1.0):
        return None
    explicit = activation_quantization(static, node.inputs[0])
    if explicit is not None and not _is_multiplied_as_stored(static, weight, explicit):
        explicit = None
    return Linear(weight, bias, explicit)


def lower_gemm(lowering: Lowering, node: Node) -> bool:
    """Lower a linear with a static weight."""
    found = linear_of(lowering.constants.static, node)
    if found is None:
        return False
    stored = lowering.constants.linear(found.weight, found.bias, found.layout)
    if found.explicit is not None:
        _lower_scaled(lowering, node, stored, found.explicit)
        return True
    x = lowering.activations(node.inputs[0])

    def run(values: Values, step: StepInputs) -> tuple[Tensor]:
        return (linear(x(values), stored),)

    lowering.emit(node, "triton" if stored.format != "plain" else "torch", run)
    return True


def lower_matmul(lowering: Lowering, node: Node) -> bool:
    """Lower a MatMul with a static matrix on the right as a linear."""
    right = input_of(node, 1)
    if right is None or not lowering.is_static(right) or len(right.shape or ()) != 2:
        return False
    x = lowering.activations(node.inputs[0])
    stored = plain(lowering.constants.on_device(right).to(torch.float32).T, lowering.dtype)

    def run(values: Values, step: StepInputs) -> tuple[Tensor]:
        rows = x(values)
        return (linear(rows.flatten(0, -2), stored).view(*rows.shape[:-1], -1),)

    lowering.emit(node, "torch", run)
    return True


def _is_multiplied_as_stored(static: StaticValues, weight: Value, explicit: ActivationQuantization) -> bool:
    stored = static.weight(weight)
    return (
        stored is not None
        and stored.format == _MULTIPLIED[explicit.to]
        and stored.group == PER_CHANNEL
        and stored.zero_points is None
        and stored.is_signed
        and len(stored.shape) == 2
    )


def _lower_scaled(lowering: Lowering, node: Node, stored: LinearWeight, explicit: ActivationQuantization) -> None:
    """Lower a linear that multiplies 8-bit activations with 8-bit weights: the node in front quantizes them."""
    dtype = lowering.dtype
    quantized = explicit.middle.outputs
    x = lowering.read(quantized[0])
    if explicit.scale is None:
        scales = lowering.read(quantized[1])
    else:
        fixed = torch.tensor([explicit.scale], dtype=torch.float32, device=lowering.device)
        scales = lambda values: fixed  # noqa: E731

    def run(values: Values, step: StepInputs) -> tuple[Tensor]:
        return (scaled_linear(x(values), scales(values), stored, out_dtype=dtype),)

    lowering.emit(node, "triton", run, reads=quantized if explicit.scale is None else quantized[:1])


HANDLERS = {("", "Gemm"): (lower_gemm,), ("", "MatMul"): (lower_matmul,)}

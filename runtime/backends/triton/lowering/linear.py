"""Linears, on floats or on activations that the graph quantizes, and lookups in stored tables."""

from __future__ import annotations

import torch
from torch import Tensor

from inferencex.formats.dialect.names import DOMAIN
from inferencex.formats.dtypes import DataType
from inferencex.formats.graph import Node, Value
from inferencex.runtime.backends.graph.activation_quantization import ActivationQuantization, activation_quantization
from inferencex.runtime.backends.graph.static_values import PER_CHANNEL
from inferencex.runtime.backends.triton.kernels.linear import linear
from inferencex.runtime.backends.triton.kernels.quantize_rows import quantize_fixed, quantize_rows
from inferencex.runtime.backends.triton.kernels.scaled_linear import scaled_linear
from inferencex.runtime.backends.triton.lowering.context import Lowering, input_of
from inferencex.runtime.backends.triton.lowering.program import Values
from inferencex.runtime.backends.triton.step_inputs import StepInputs
from inferencex.runtime.backends.triton.weights import plain

_QUANTIZED = {DataType.INT8: torch.int8, DataType.FLOAT8E4M3FN: torch.float8_e4m3fn}
_MULTIPLIED = {"i8": "int8", "f8e4m3": "f8e4m3"}  # activations -> the weights that they are multiplied with as they are


def lower_gemm(lowering: Lowering, node: Node) -> bool:
    """Lower `Gemm(x, weight, bias?; transB=1)` with a static weight."""
    attributes, weight, bias = node.attributes, input_of(node, 1), input_of(node, 2)
    if weight is None or not lowering.is_static(weight) or not attributes.get_int("transB", 0):
        return False
    if attributes.get_int("transA", 0) or attributes.get_float("alpha", 1.0) != 1.0:
        return False
    if bias is not None and (not lowering.is_static(bias) or attributes.get_float("beta", 1.0) != 1.0):
        return False
    explicit = activation_quantization(lowering.constants.static, node.inputs[0])
    if explicit is not None and _is_multiplied_as_stored(lowering, weight, explicit):
        _lower_scaled(lowering, node, weight, bias, explicit)
        return True
    x, stored = lowering.activations(node.inputs[0]), lowering.constants.linear(weight, bias)

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


def _is_multiplied_as_stored(lowering: Lowering, weight: Value, explicit: ActivationQuantization) -> bool:
    stored = lowering.constants.static.weight(weight)
    return (
        stored is not None
        and stored.format == _MULTIPLIED[explicit.to]
        and stored.group == PER_CHANNEL
        and stored.zero_points is None
        and stored.is_signed
        and len(stored.shape) == 2
    )


def _lower_scaled(
    lowering: Lowering, node: Node, weight: Value, bias: Value | None, explicit: ActivationQuantization
) -> None:
    """Lower a linear that multiplies 8-bit activations with 8-bit weights: the node in front quantizes them."""
    stored, dtype = lowering.constants.linear(weight, bias, "rows"), lowering.dtype
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


def lower_quantize_rows(lowering: Lowering, node: Node) -> bool:
    """Lower the quantization of rows by their own scales."""
    to, x = _QUANTIZED[DataType(node.attributes.get_int("to"))], lowering.activations(node.inputs[0])

    def run(values: Values, step: StepInputs) -> tuple[Tensor, Tensor]:
        return quantize_rows(x(values), to)

    lowering.emit(node, "triton", run)
    return True


def lower_quantize(lowering: Lowering, node: Node) -> bool:
    """Lower the quantization of a matrix by one fixed scale."""
    users = node.outputs[0].consumers()
    explicit = activation_quantization(lowering.constants.static, users[0].outputs[0]) if users else None
    if explicit is None or explicit.middle is not node or explicit.scale is None:
        return False
    x, to = lowering.activations(node.inputs[0]), torch.int8 if explicit.to == "i8" else torch.float8_e4m3fn
    scale = torch.tensor([explicit.scale], dtype=torch.float32, device=lowering.device)

    def run(values: Values, step: StepInputs) -> tuple[Tensor]:
        return (quantize_fixed(x(values), scale, to),)

    lowering.emit(node, "triton", run)
    return True


HANDLERS = {
    ("", "Gemm"): (lower_gemm,),
    ("", "MatMul"): (lower_matmul,),
    ("", "QuantizeLinear"): (lower_quantize,),
    (DOMAIN, "QuantizeRows"): (lower_quantize_rows,),
}

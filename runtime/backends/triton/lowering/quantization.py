"""Quantization of activations where the graph asks for it: by a launch of its own, or along with what computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inferencex.formats.dialect.names import DOMAIN
from inferencex.formats.dtypes import DataType
from inferencex.formats.graph import Node, Value
from inferencex.runtime.backends.graph.activation_quantization import activation_quantization
from inferencex.runtime.backends.triton.kernels.quantize_rows import Quantization, Quantized
from inferencex.runtime.backends.triton.lowering.context import Lowering
from inferencex.runtime.backends.triton.lowering.program import Values
from inferencex.runtime.backends.triton.step_inputs import StepInputs

_QUANTIZED = {DataType.INT8: torch.int8, DataType.FLOAT8E4M3FN: torch.float8_e4m3fn}


@dataclass(frozen=True)
class QuantizationBehind:
    """How what a node computes is quantized, by another that needs no launch of its own then.

    outputs: what the other node computes: the values, and their scales where those are not fixed
    keeps:   whether something reads the unquantized rows as well
    """

    quantization: Quantization
    outputs: tuple[Value, ...]
    keeps: bool

    def results(self, quantized: Quantized) -> Sequence[Tensor]:
        """Return the tensors of `outputs`."""
        return (quantized.values, quantized.scales)[: len(self.outputs)]


def quantization_behind(lowering: Lowering, value: Value) -> QuantizationBehind | None:
    """Return how rows `[T, S]` are quantized behind the node that computes them; None where they are not.

    Where they are in several ways, it is the first; the others read the unquantized rows.
    """
    if value.shape is None or len(value.shape) != 2:
        return None
    readers = list(dict.fromkeys(value.consumers()))
    for node in readers:
        quantization = _quantization_of(lowering, node)
        if quantization is not None:
            keeps = value.name in lowering.kept or len(readers) > 1
            return QuantizationBehind(quantization, tuple(node.outputs), keeps)
    return None


def _quantization_of(lowering: Lowering, node: Node) -> Quantization | None:
    """Return what a node does to its first input; None for nodes that do not quantize, or not as kernels do."""
    if (node.domain, node.op_type) == (DOMAIN, "QuantizeRows"):
        return Quantization(_QUANTIZED[DataType(node.attributes.get_int("to"))])
    if (node.domain, node.op_type) != ("", "QuantizeLinear"):
        return None
    users = node.outputs[0].consumers()
    explicit = activation_quantization(lowering.constants.static, users[0].outputs[0]) if users else None
    if explicit is None or explicit.middle is not node or explicit.scale is None:
        return None
    to = torch.int8 if explicit.to == "i8" else torch.float8_e4m3fn
    return Quantization(to, torch.tensor([explicit.scale], dtype=torch.float32, device=lowering.device))


def lower_quantize(lowering: Lowering, node: Node) -> bool:
    """Lower the quantization of rows by their own scales, or of a matrix by one fixed scale."""
    quantization = _quantization_of(lowering, node)
    if quantization is None:
        return False
    x = lowering.activations(node.inputs[0])

    def run(values: Values, step: StepInputs) -> tuple[Tensor, ...]:
        quantized = quantization.of(x(values))
        return (quantized.values, quantized.scales)[: len(node.outputs)]

    lowering.emit(node, "triton", run)
    return True


HANDLERS = {("", "QuantizeLinear"): (lower_quantize,), (DOMAIN, "QuantizeRows"): (lower_quantize,)}

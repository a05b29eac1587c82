"""How the graph quantizes what linears multiply their weights with."""

from __future__ import annotations

from dataclasses import dataclass

from inferencex.formats.bundle import Bundle
from inferencex.formats.dtypes import DataType
from inferencex.formats.export.parameters import Parameter
from inferencex.formats.graph import Node, Value

_READ_THROUGH = ("DequantizeLinear", "UnpackBits", "Cast", "Identity")


@dataclass(frozen=True)
class Activation:
    """Inputs of a linear as INT8 or FLOAT8E4M3FN: with one scale for all of them, or where it is None, one a token."""

    dtype: DataType
    scale: float | None


def activation_of(parameter: Parameter) -> Activation | None:
    """Return how the inputs of the linear that reads a weight are quantized; None where they are not."""
    bundle = parameter.bundle
    gemm = _linear_of(bundle.graph.initializers[parameter.pieces[0].tensor])
    source = None if gemm is None or gemm.inputs[0] is None else gemm.inputs[0].producer()
    if source is None or source.op_type != "DequantizeLinear" or source.inputs[0] is None:
        return None
    quantize = source.inputs[0].producer()
    if quantize is None:
        return None
    if quantize.op_type == "QuantizeRows":
        return Activation(DataType(quantize.attributes.get_int("to")), None)
    if quantize.op_type != "QuantizeLinear" or source.inputs[1] is None or source.inputs[2] is None:
        return None
    scale = _number(bundle, source.inputs[1])
    return Activation(source.inputs[2].dtype or DataType.INT8, scale)


def quantizes_activations(bundle: Bundle) -> bool:
    """Tell whether any input of a linear is quantized."""
    return any(node.op_type in ("QuantizeRows", "QuantizeLinear") for node in bundle.graph)


def _linear_of(weight: Value) -> Node | None:
    pending = [weight]
    while pending:
        value = pending.pop()
        for node in value.consumers():
            if node.op_type == "Gemm" and node.inputs[1] is value:
                return node
            if node.op_type in _READ_THROUGH and node.inputs[0] is value:
                pending.extend(node.outputs)
    return None


def _number(bundle: Bundle, value: Value) -> float:
    array = value.numpy() if value.constant is not None else bundle.tensor(value.name)
    return float(array.reshape(-1)[0])

"""Where the graph itself quantizes activations: in the two forms that bundles have (docs/quantization.md)."""

from __future__ import annotations

import numpy as np

from inferencex.formats.dialect.names import DOMAIN
from inferencex.formats.dtypes import DataType
from inferencex.formats.graph import Node, Value
from inferencex.formats.records import record
from inferencex.runtime.backends.graph.static_values import StaticValues

_ACTIVATION_TYPES = {DataType.INT8: "i8", DataType.FLOAT8E4M3FN: "f8e4m3"}


@record(frozen=True)
class ActivationQuantization:
    """How the graph quantizes a value.

    source: what is quantized
    to:     i8 or f8e4m3
    scale:  its fixed scale; None where every row has its own
    middle: the node that quantizes, in front of the DequantizeLinear
    """

    source: Value
    to: str
    scale: float | None
    middle: Node


def activation_quantization(static: StaticValues, value: Value | None) -> ActivationQuantization | None:
    """Return how the graph quantizes a value, where it does so in one of the two forms that bundles have."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "DequantizeLinear" or node.domain != "" or node.inputs[0] is None:
        return None
    middle = node.inputs[0].producer()
    if middle is None or not middle.inputs or middle.inputs[0] is None:
        return None
    if node.attributes.get_int("block_size", 0):
        return None
    source = middle.inputs[0]
    if source in static or source.shape is None or len(source.shape) != 2:
        return None
    if (middle.domain, middle.op_type) == (DOMAIN, "QuantizeRows"):
        own = node.inputs[0] is middle.outputs[0] and node.inputs[1] is middle.outputs[1]
        to = _ACTIVATION_TYPES.get(_data_type(middle.attributes.get_int("to")))
        if not own or to is None or _input(node, 2) is not None or node.attributes.get_int("axis", 1) not in (0, -2):
            return None
        return ActivationQuantization(source, to, None, middle)
    if (middle.domain, middle.op_type) != ("", "QuantizeLinear") or not middle.attributes.get_int("saturate", 1):
        return None
    scales = [_scalar(static, _input(user, 1)) for user in (middle, node)]
    zero_points = [_input(user, 2) for user in (middle, node)]
    if scales[0] is None or scales[0] != scales[1] or not 0 < scales[0] < float("inf"):
        return None
    for zero_point in zero_points:
        if zero_point is None or _scalar(static, zero_point) != 0 or zero_point.dtype is None:
            return None
    to = _ACTIVATION_TYPES.get(zero_points[0].dtype) if zero_points[0] is not None and zero_points[0].dtype else None
    return None if to is None else ActivationQuantization(source, to, scales[0], middle)


def _data_type(number: int) -> DataType:
    return DataType(number) if number in DataType._value2member_map_ else DataType.UNDEFINED


def _scalar(static: StaticValues, value: Value | None) -> float | None:
    if value is None or value not in static:
        return None
    array = static.array(value)
    return float(np.asarray(array, dtype=np.float64).reshape(-1)[0]) if array.size == 1 else None


def _input(node: Node, place: int) -> Value | None:
    return node.inputs[place] if place < len(node.inputs) else None

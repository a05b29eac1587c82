"""Which values are handed on as quantized activations, and in which blocks.

Where the graph itself quantizes a value (docs/quantization.md), linears read just that: integer kernels for INT8 in
front of INT8 weights with one scale a channel, else float32 of what it stands for. Elsewhere integer weights meet
activations quantized in short blocks, unless float activations are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from inferencex.formats.dialect.names import DOMAIN
from inferencex.formats.dtypes import DataType
from inferencex.formats.graph import Node, Value
from inferencex.runtime.backends.cpu.lowering.context import AttributeValue, Lowering, Quantized, input_of
from inferencex.runtime.backends.cpu.lowering.extents import Extent
from inferencex.runtime.backends.cpu.lowering.static_values import PER_CHANNEL, StoredWeight
from inferencex.runtime.backends.cpu.lowering.views import View

_LONGEST_BLOCK = 32  # BlockLayout's
_LONGEST_ROW = ((1 << 31) - 1) // (128 * 256)  # that integer kernels multiply with one scale

_ACTIVATION_TYPES = {DataType.INT8: "i8", DataType.FLOAT8E4M3FN: "f8e4m3"}


@dataclass(frozen=True)
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

    @property
    def attributes(self) -> dict[str, AttributeValue]:
        """What the native operations need to know of it."""
        return {} if self.scale is None else {"static_scale": self.scale}


def activation_group(weight: StoredWeight) -> int:
    """Return the group of the block layout that a weight's activations have; equal layouts have equal groups."""
    features = weight.shape[-1]
    group = features if weight.group == PER_CHANNEL else min(weight.group, features)
    block = -(-group // -(-group // _LONGEST_BLOCK))
    # Cut evenly across groups, the layout is the one that groups of a block would have.
    return block if group % block == 0 or group == features else group


def integer_weight(lowering: Lowering, node: Node) -> StoredWeight | None:
    """Return the weight of a linear that runs on integers, else None."""
    if not lowering.options.integer_activations or node.domain != "" or node.op_type != "Gemm":
        return None
    if not node.attributes.get_int("transB", 0) or node.inputs[1] is None or node.inputs[1] not in lowering.static:
        return None
    weight = lowering.static.weight(node.inputs[1])
    if weight is None or not weight.is_integer or len(weight.shape) != 2:
        return None
    explicit = activation_quantization(lowering, node.inputs[0])
    if explicit is not None:
        fits = explicit.to == "i8" and weight.group == PER_CHANNEL and weight.shape[1] <= _LONGEST_ROW
        return weight if fits else None
    return weight


def reads_quantized(lowering: Lowering, node: Node, value: Value) -> bool:
    """Tell whether a consumer takes a value in quantized form."""
    return node.inputs[0] is value and value not in node.inputs[1:] and integer_weight(lowering, node) is not None


def wanted_groups(lowering: Lowering, value: Value) -> Iterator[int]:
    """Yield the groups that a value's consumers want it quantized in, each once."""
    seen = set()
    for node in value.consumers():
        weight = integer_weight(lowering, node)
        if weight is not None and reads_quantized(lowering, node, value):
            group = activation_group(weight)
            if group not in seen:
                seen.add(group)
                yield group


def allocate_quantized(lowering: Lowering, rows: Extent, features: int, group: int, *, whole: bool) -> Quantized:
    """Return places for the three parts of quantized activations `[rows, features]`."""
    blocks, row_bytes = lowering.block_layout(features, group, whole)
    return Quantized(
        lowering.allocate("i8", (rows, Extent(row_bytes))),
        lowering.allocate("f32", (rows, Extent(blocks))),
        lowering.allocate("i32", (rows, Extent(blocks))),
    )


def quantized_input(lowering: Lowering, value: Value, group: int) -> Quantized:
    """Return a value quantized in groups, adding the operation that does it where nothing has yet."""
    key = (value.name, str(group))
    found = lowering.quantized.get(key)
    if found is None:
        view = lowering.with_contiguous_rows(lowering.view(value), value.name)
        found = quantize(lowering, view, value.name, group)
        lowering.quantized[key] = found
    return found


def quantize(lowering: Lowering, view: View, name: str, group: int) -> Quantized:
    """Add the operation that quantizes a matrix."""
    result = allocate_quantized(lowering, view.dims[0], view.dims[1].coefficient, group, whole=False)
    lowering.emit("Quantize", name, [view], [result.values, result.scales, result.sums], group=group)
    return result


def quantized_whole(lowering: Lowering, explicit: ActivationQuantization) -> Quantized:
    """Return a value quantized as the graph says, with one scale a row, for integer kernels."""
    key = (explicit.source.name, "dynamic" if explicit.scale is None else f"static {explicit.scale!r}")
    found = lowering.quantized.get(key)
    if found is None:
        name = explicit.source.name
        view = lowering.with_contiguous_rows(lowering.view(explicit.source), name)
        features = view.dims[1].coefficient
        found = allocate_quantized(lowering, view.dims[0], features, features, whole=True)
        parts = [found.values, found.scales, found.sums]
        lowering.emit("Quantize", name, [view], parts, whole=1, **explicit.attributes)
        lowering.quantized[key] = found
    return found


def lower_dequantize(lowering: Lowering, node: Node) -> bool:
    """Lower a value that the graph quantizes, and that others than integer kernels read."""
    explicit = activation_quantization(lowering, node.outputs[0])
    if explicit is None:
        return False
    view = lowering.with_contiguous_rows(lowering.view(explicit.source), node.outputs[0].name)
    y = lowering.define(node.outputs[0], "f32", view.dims)
    lowering.emit("FakeQuantize", node.outputs[0].name, [view], [y], to=explicit.to, **explicit.attributes)
    return True


def absorb_quantization(lowering: Lowering, node: Node) -> None:
    """Mark what another instruction computes along where a node dequantizes what the graph has quantized."""
    if node.op_type != "DequantizeLinear" or node.domain != "" or node.outputs[0] in lowering.static:
        return
    value = node.outputs[0]
    explicit = activation_quantization(lowering, value)
    if explicit is None:
        return
    if all(user is node for output in explicit.middle.outputs for user in output.consumers()):
        lowering.absorbed.update(output.name for output in explicit.middle.outputs)
    if not lowering.needs_float(value, lambda user: reads_quantized(lowering, user, value)):
        lowering.absorbed.add(value.name)


def activation_quantization(lowering: Lowering, value: Value | None) -> ActivationQuantization | None:
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
    if source in lowering.static or source.shape is None or len(source.shape) != 2:
        return None
    if (middle.domain, middle.op_type) == (DOMAIN, "QuantizeRows"):
        own = node.inputs[0] is middle.outputs[0] and node.inputs[1] is middle.outputs[1]
        to = _ACTIVATION_TYPES.get(_data_type(middle.attributes.get_int("to")))
        if not own or to is None or input_of(node, 2) is not None or node.attributes.get_int("axis", 1) not in (0, -2):
            return None
        return ActivationQuantization(source, to, None, middle)
    if (middle.domain, middle.op_type) != ("", "QuantizeLinear") or not middle.attributes.get_int("saturate", 1):
        return None
    scales = [_scalar(lowering, input_of(user, 1)) for user in (middle, node)]
    zero_points = [input_of(user, 2) for user in (middle, node)]
    if scales[0] is None or scales[0] != scales[1] or not 0 < scales[0] < float("inf"):
        return None
    for zero_point in zero_points:
        if zero_point is None or _scalar(lowering, zero_point) != 0 or zero_point.dtype is None:
            return None
    to = _ACTIVATION_TYPES.get(zero_points[0].dtype) if zero_points[0] is not None and zero_points[0].dtype else None
    return None if to is None else ActivationQuantization(source, to, scales[0], middle)


def _data_type(number: int) -> DataType:
    return DataType(number) if number in DataType._value2member_map_ else DataType.UNDEFINED


def _scalar(lowering: Lowering, value: Value | None) -> float | None:
    if value is None or value not in lowering.static:
        return None
    array = lowering.static.array(value)
    return float(np.asarray(array, dtype=np.float64).reshape(-1)[0]) if array.size == 1 else None

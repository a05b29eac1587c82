"""Which values are handed on as quantized activations, and in which blocks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from inferencex.formats.graph import Node, Value
from inferencex.runtime.backends.cpu.lowering.context import Lowering, Quantized, input_of
from inferencex.runtime.backends.cpu.lowering.extents import Extent
from inferencex.runtime.backends.cpu.lowering.static_values import PER_CHANNEL, StoredWeight
from inferencex.runtime.backends.cpu.lowering.views import View

_LONGEST_BLOCK = 32  # BlockLayout's


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
    return weight if weight is not None and weight.is_integer and len(weight.shape) == 2 else None


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


def static_scale(lowering: Lowering, value: Value) -> tuple[Value, float] | None:
    """Return what was quantized, and its scale, where a value went through INT8 with one fixed scale (W8A8)."""
    dequantize = value.producer()
    if dequantize is None or dequantize.op_type != "DequantizeLinear" or dequantize.inputs[0] is None:
        return None
    quantize_node = dequantize.inputs[0].producer()
    if quantize_node is None or quantize_node.op_type != "QuantizeLinear" or quantize_node.inputs[0] is None:
        return None
    scales = [_scalar(lowering, input_of(node, 1)) for node in (quantize_node, dequantize)]
    zero_points = [input_of(node, 2) for node in (quantize_node, dequantize)]
    if scales[0] is None or scales[0] != scales[1]:
        return None
    for zero_point in zero_points:
        if zero_point is None or _scalar(lowering, zero_point) != 0 or zero_point.dtype is None:
            return None
        if zero_point.dtype.name != "INT8":
            return None
    return quantize_node.inputs[0], scales[0]


def _scalar(lowering: Lowering, value: Value | None) -> float | None:
    if value is None or value not in lowering.static:
        return None
    array = lowering.static.array(value)
    return float(np.asarray(array, dtype=np.float64).reshape(-1)[0]) if array.size == 1 else None

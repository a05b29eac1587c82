"""Which values are handed on as quantized activations, and in which blocks.

Where the graph itself quantizes a value (docs/quantization.md), linears read just that: integer kernels for INT8 in
front of INT8 weights with one scale a channel, else float32 of what it stands for. Elsewhere integer weights meet
activations quantized in short blocks, unless float activations are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

from inferencex.formats.graph import Node, Value
from inferencex.runtime.backends.cpu.lowering.context import AttributeValue, Lowering, Quantized
from inferencex.runtime.backends.cpu.lowering.extents import Extent
from inferencex.runtime.backends.cpu.lowering.views import View
from inferencex.runtime.backends.graph.activation_quantization import ActivationQuantization, activation_quantization
from inferencex.runtime.backends.graph.static_values import PER_CHANNEL, StoredWeight

_LONGEST_BLOCK = 32  # BlockLayout's
_LONGEST_ROW = ((1 << 31) - 1) // (128 * 256)  # that integer kernels multiply with one scale


def activation_group(weight: StoredWeight) -> int:
    """Return the group of the block layout that a weight's activations have; equal layouts have equal groups."""
    features = weight.shape[-1]
    group = features if weight.group == PER_CHANNEL else min(weight.group, features)
    block = -(-group // -(-group // _LONGEST_BLOCK))
    # Cut evenly across groups, the layout is the one that groups of a block would have.
    return block if group % block == 0 or group == features else group


def integer_weight(lowering: Lowering, node: Node) -> StoredWeight | None:
    """Return the weight of a linear that runs on integers, else None."""
    if node not in lowering.weights:  # whoever makes what a linear reads asks too
        lowering.weights[node] = _integer_weight(lowering, node)
    return lowering.weights[node]


def _integer_weight(lowering: Lowering, node: Node) -> StoredWeight | None:
    if not lowering.options.integer_activations or node.domain != "" or node.op_type != "Gemm":
        return None
    if not node.attributes.get_int("transB", 0) or node.inputs[1] is None or node.inputs[1] not in lowering.static:
        return None
    weight = lowering.static.weight(node.inputs[1])
    if weight is None or not weight.is_integer or len(weight.shape) != 2:
        return None
    explicit = activation_quantization(lowering.static, node.inputs[0])
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
        lowering.emit("Quantize", name, [view], parts, whole=1, **_scale_of(explicit))
        lowering.quantized[key] = found
    return found


def _scale_of(explicit: ActivationQuantization) -> dict[str, AttributeValue]:
    """Return what the native operations need to know of it."""
    return {} if explicit.scale is None else {"static_scale": explicit.scale}


def lower_dequantize(lowering: Lowering, node: Node) -> bool:
    """Lower a value that the graph quantizes, and that others than integer kernels read."""
    explicit = activation_quantization(lowering.static, node.outputs[0])
    if explicit is None:
        return False
    view = lowering.with_contiguous_rows(lowering.view(explicit.source), node.outputs[0].name)
    y = lowering.define(node.outputs[0], "f32", view.dims)
    lowering.emit("FakeQuantize", node.outputs[0].name, [view], [y], to=explicit.to, **_scale_of(explicit))
    return True


def absorb_quantization(lowering: Lowering, node: Node) -> None:
    """Mark what another instruction computes along where a node dequantizes what the graph has quantized."""
    if node.op_type != "DequantizeLinear" or node.domain != "" or node.outputs[0] in lowering.static:
        return
    value = node.outputs[0]
    explicit = activation_quantization(lowering.static, value)
    if explicit is None:
        return
    if all(user is node for output in explicit.middle.outputs for user in output.consumers()):
        lowering.absorbed.update(output.name for output in explicit.middle.outputs)
    if not lowering.needs_float(value, lambda user: reads_quantized(lowering, user, value)):
        lowering.absorbed.add(value.name)

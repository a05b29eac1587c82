"""Routed experts, and lookups of rows in a stored table."""

from __future__ import annotations

import numpy as np

from inferencex.formats.dtypes import DataType
from inferencex.formats.graph import Node, Value
from inferencex.runtime.backends.cpu.lowering.context import Lowering, input_of
from inferencex.runtime.backends.cpu.lowering.extents import Extent
from inferencex.runtime.backends.cpu.lowering.views import View, constant_view, weight_views
from inferencex.runtime.backends.graph.static_values import StoredArray, StoredWeight


def lower_experts(lowering: Lowering, node: Node) -> bool:
    """Lower a layer of gated experts."""
    gate_up, down = (_stack(lowering, input_of(node, place)) for place in (3, 4))
    biases = [_float_constant(lowering, input_of(node, place)) for place in (5, 6)]
    if gate_up is None or down is None or _kind(gate_up) != _kind(down):
        gate_up, down = (_as_float(lowering, input_of(node, place)) for place in (3, 4))
    integer = lowering.options.integer_activations and gate_up.is_integer
    if integer:
        gate_up, down = gate_up.for_integers(), down.for_integers()
    name = node.outputs[0].name
    x, index, weights = (lowering.contiguous(lowering.view(node.inputs[i]), name) for i in range(3))
    y = lowering.define(node.outputs[0], "f32", x.dims)
    lowering.emit(
        "Experts",
        name,
        [
            x,
            index,
            weights,
            *weight_views(gate_up),
            *weight_views(down),
            *biases,
        ],
        [y],
        experts=gate_up.shape[0],
        hidden=gate_up.shape[2],
        inner=down.shape[2],
        format=gate_up.format,
        group=gate_up.group,
        signed=int(gate_up.is_signed),
        activation=node.attributes.get_string("activation"),
        layout=node.attributes.get_string("layout", "concat"),
        alpha=float(node.attributes.get_float("alpha", 1.0)),
        limit=float(node.attributes.get_float("limit", 0.0)),
        integer=int(integer),
        max_tokens=lowering.options.max_tokens,
    )
    return True


def lower_expert_linear(lowering: Lowering, node: Node) -> bool:
    """Lower a linear whose weight is chosen row by row."""
    weight = _stack(lowering, input_of(node, 2)) or _as_float(lowering, input_of(node, 2))
    integer = lowering.options.integer_activations and weight.is_integer
    if integer:
        weight = weight.for_integers()
    name = node.outputs[0].name
    x, index = (lowering.contiguous(lowering.view(node.inputs[i]), name) for i in range(2))
    rows = x.dims[0]
    y = lowering.define(node.outputs[0], "f32", (rows, Extent(weight.shape[1])))
    lowering.emit(
        "ExpertLinear",
        name,
        [x, index, *weight_views(weight), _float_constant(lowering, input_of(node, 3))],
        [y],
        experts=weight.shape[0],
        channels=weight.shape[1],
        features=weight.shape[2],
        format=weight.format,
        group=weight.group,
        signed=int(weight.is_signed),
        integer=int(integer),
        max_tokens=lowering.options.max_tokens,
    )
    return True


def lower_embedding(lowering: Lowering, node: Node) -> bool:
    """Lower a lookup of rows in a static matrix."""
    table, index = node.inputs[0], node.inputs[1]
    if table is None or index is None or table not in lowering.static or index in lowering.static:
        return False
    if node.attributes.get_int("axis", 0) != 0 or table.dtype is not DataType.FLOAT:
        return False
    weight = lowering.static.weight(table)
    if weight is None or len(weight.shape) != 2 or (weight.format == "f8e4m3" and weight.scales is None):
        return False
    place = lowering.view(index)
    if place.rank != 1:
        return False
    y = lowering.define(node.outputs[0], "f32", (place.dims[0], Extent(weight.shape[1])))
    lowering.emit(
        "Embedding",
        node.outputs[0].name,
        [*weight_views(weight), lowering.contiguous(place, node.outputs[0].name)],
        [y],
        rows=weight.shape[0],
        width=weight.shape[1],
        bits=4 if weight.format == "int4" else 8,
        signed=int(weight.is_signed),
        group=weight.group,
        **({"format": weight.format} if weight.format in ("int3", "int5", "int6", "f4e2m1") else {}),
    )
    return True


def _kind(weight: StoredWeight) -> tuple[str, int, bool]:
    """Return what both weights of an expert must have in common to be read by one operation."""
    return weight.format, weight.group, weight.is_signed


def _stack(lowering: Lowering, value: Value | None) -> StoredWeight | None:
    if value is None or value not in lowering.static:
        return None
    weight = lowering.static.weight(value)
    return weight if weight is not None and len(weight.shape) == 3 else None


def _as_float(lowering: Lowering, value: Value | None) -> StoredWeight:
    assert value is not None, "experts have weights"
    lowering.widened.append(value.name)
    array = np.asarray(lowering.static.array(value), dtype=np.float32)
    return StoredWeight("f32", array.shape, StoredArray("f32", array))


def _float_constant(lowering: Lowering, value: Value | None) -> View | None:
    if value is None:
        return None
    return constant_view(np.asarray(lowering.static.array(value), dtype=np.float32), "f32")

"""Fuse a layer of routed experts: two grouped linears, the gate between them and the weighted sum behind."""

from __future__ import annotations

import onnx_ir as ir

from inferencex.convert.passes.editing import Editor, attribute, drop_dead, ints_of, producer, rank, sole_user
from inferencex.formats.dialect.schemas import DOMAIN


def _through_reshapes(value: ir.Value | None) -> ir.Value | None:
    while value is not None:
        node = value.producer()
        if node is None or node.op_type not in ("Reshape", "Unsqueeze", "Squeeze", "Identity", "Expand"):
            return value
        value = node.inputs[0]
    return None


def _sum_over_experts(outer: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """Match `sum over k of reshape(outer * weights)`; returns the weights `[T, k]` and the sum."""
    product = sole_user(outer)
    if product is None or product.op_type != "Mul":
        return None
    weights = _through_reshapes(product.inputs[1] if product.inputs[0] is outer else product.inputs[0])
    folded = sole_user(product.outputs[0])
    if folded is None or folded.op_type != "Reshape" or rank(folded.outputs[0]) != 3:
        return None
    total = sole_user(folded.outputs[0])
    if total is None or total.op_type != "ReduceSum" or ints_of(total.inputs[1]) not in ([1], [-2]):
        return None
    if attribute(total, "keepdims", 1) or weights is None or rank(weights) != 2:
        return None
    return weights, total.outputs[0]


def fuse_experts(model: ir.Model) -> int:
    """Fuse in place; returns how many expert layers were found."""
    edit = Editor(model.graph)
    count = 0
    for down in list(model.graph):
        if down.op_type != "ExpertLinear" or down.domain != DOMAIN:
            continue
        gate = producer(down.inputs[0], "GatedActivation", DOMAIN)
        first = producer(gate.inputs[0], "ExpertLinear", DOMAIN) if gate is not None else None
        found = _sum_over_experts(down.outputs[0])
        if gate is None or first is None or found is None or first.inputs[1] is not down.inputs[1]:
            continue
        weights, output = found
        x, index = _through_reshapes(first.inputs[0]), _through_reshapes(down.inputs[1])
        if x is None or index is None or rank(x) != 2 or rank(index) != 2:
            continue
        biases = [node.inputs[3] if len(node.inputs) > 3 else None for node in (first, down)]
        attributes = {name: a.value for name, a in gate.attributes.items()}
        node = edit.node(
            "Experts",
            [x, index, weights, first.inputs[2], down.inputs[2], *biases],
            attributes,
            domain=DOMAIN,
            shape=output.shape,
            stem="experts",
        )
        anchor = output.producer()
        assert anchor is not None
        edit.substitute(output, edit.before(anchor, node))
        count += 1
    drop_dead(model.graph)
    return count

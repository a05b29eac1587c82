"""Fuse RMS and layer normalizations that models spell out into the standard operators."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from inferencex.convert.passes.editing import (
    Editor,
    attribute,
    constant_of,
    drop_dead,
    ints_of,
    is_weight,
    producer,
    rank,
    scalar_of,
    sole_user,
    static_dims,
)


def _mean_over_last(value: ir.Value | None) -> ir.Value | None:
    """Return `x` if `value` is `ReduceMean(x, axis=-1, keepdims=1)`."""
    node = producer(value, "ReduceMean")
    if node is None or not attribute(node, "keepdims", 1):
        return None
    x = node.inputs[0]
    axes = ints_of(node.inputs[1]) if len(node.inputs) > 1 else None
    assert x is not None
    return x if axes in ([-1], [rank(x) - 1]) else None


def _square_of(value: ir.Value | None) -> ir.Value | None:
    """Return `x` if `value` is `x^2`."""
    power = producer(value, "Pow")
    if power is not None and scalar_of(power.inputs[1]) == 2.0:
        return power.inputs[0]
    product = producer(value, "Mul")
    return product.inputs[0] if product is not None and product.inputs[0] is product.inputs[1] else None


def _other(node: ir.Node, value: ir.Value) -> ir.Value | None:
    return node.inputs[1] if node.inputs[0] is value else node.inputs[0]


def _inverse_root(mean: ir.Value) -> list[tuple[ir.Value, float, bool]]:
    """Find `1 / sqrt(mean + epsilon)`: (value, epsilon, whether it is the root itself, to be divided by)."""
    found: list[tuple[ir.Value, float, bool]] = []
    for add in mean.consumers():
        if add.op_type != "Add" or (epsilon := scalar_of(_other(add, mean))) is None:
            continue
        for node in add.outputs[0].consumers():
            if node.op_type == "Pow" and scalar_of(node.inputs[1]) == -0.5:
                found.append((node.outputs[0], epsilon, False))
            if node.op_type != "Sqrt":
                continue
            found.append((node.outputs[0], epsilon, True))
            for inverse in node.outputs[0].consumers():
                is_inverse = inverse.op_type == "Div" and scalar_of(inverse.inputs[0]) == 1.0
                if inverse.op_type == "Reciprocal" or is_inverse:
                    found.append((inverse.outputs[0], epsilon, False))
    return found


def _is_scale(value: ir.Value | None, width: int) -> bool:
    """Tell whether a value is a vector of `width` that does not depend on the input."""
    if value is None or value.shape is None or list(value.shape) != [width]:
        return False
    return is_weight(value) or constant_of(value) is not None


def _fuse_one(edit: Editor, mean_node: ir.Node) -> bool:
    x = _square_of(mean_node.inputs[0])
    if (
        x is None
        or _mean_over_last(mean_node.outputs[0]) is None
        or x.shape is None
        or not isinstance(x.shape[-1], int)
    ):
        return False
    width = x.shape[-1]
    for root, epsilon, divides in _inverse_root(mean_node.outputs[0]):
        for node in root.consumers():
            if node.op_type != ("Div" if divides else "Mul") or _other(node, root) is not x:
                continue
            if divides and node.inputs[0] is not x:
                continue
            output = node.outputs[0]
            scale: ir.Value | None = None
            after = sole_user(output)
            if after is not None and after.op_type == "Mul" and _is_scale(_other(after, output), width):
                scale, output = _other(after, output), after.outputs[0]
            if scale is None:
                scale = edit.constant(np.ones(width, dtype=np.float32), stem="unit_scale")
            _emit(edit, x, scale, epsilon, output)
            return True
    return False


def _emit(edit: Editor, x: ir.Value, scale: ir.Value, epsilon: float, output: ir.Value) -> None:
    """Write the normalization; of centered values it is a layer normalization."""
    op_type, source, bias = "RMSNormalization", x, None
    centered = producer(x, "Sub")
    if centered is not None and centered.inputs[0] is not None:
        whole = centered.inputs[0]
        if _mean_over_last(centered.inputs[1]) is whole:
            op_type, source = "LayerNormalization", whole
            after = sole_user(output)
            if after is not None and after.op_type == "Add" and _is_scale(_other(after, output), static_dims(scale)[0]):
                bias, output = _other(after, output), after.outputs[0]
    node = edit.node(
        op_type,
        [source, scale, bias],
        {"axis": -1, "epsilon": float(epsilon)},
        shape=output.shape,
        stem=str(output.name),
    )
    anchor = output.producer()
    assert anchor is not None
    edit.substitute(output, edit.before(anchor, node))


def fuse_norms(model: ir.Model) -> int:
    """Fuse in place; returns how many normalizations were found."""
    edit = Editor(model.graph)
    count = sum(_fuse_one(edit, node) for node in list(model.graph) if node.op_type == "ReduceMean")
    drop_dead(model.graph)
    return count

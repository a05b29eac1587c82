"""Fuse gated activations, and the two linears in front of them into one."""

from __future__ import annotations

import onnx_ir as ir

from inferencex.convert.passes.editing import (
    WEIGHT,
    Editor,
    attribute,
    dims,
    drop_dead,
    is_weight,
    producer,
    rank,
    scalar_of,
    shape_of,
    static_dims,
)
from inferencex.convert.passes.weights import combine, expression_of
from inferencex.formats.dialect.schemas import DOMAIN


def activation_of(value: ir.Value | None) -> tuple[str, ir.Value] | None:
    """Return `(name, x)` if `value` is a known activation of `x`."""
    node = None if value is None else value.producer()
    if node is None or not node.inputs:
        return None
    source = node.inputs[0]
    match node.op_type:
        case "Gelu":
            name = "gelu_tanh" if attribute(node, "approximate", "none") == "tanh" else "gelu"
            return (name, source) if source is not None else None
        case "Relu":
            return ("relu", source) if source is not None else None
        case "Sigmoid":
            return ("sigmoid", source) if source is not None else None
        case "Mul":
            for x, gate in (node.inputs, tuple(reversed(node.inputs))):
                sigmoid = producer(gate, "Sigmoid")
                if sigmoid is not None and sigmoid.inputs[0] is x and x is not None:
                    return "silu", x
            a, b = node.inputs
            rectified = producer(a, "Relu")
            if a is b and rectified is not None and rectified.inputs[0] is not None:
                return "relu2", rectified.inputs[0]
        case "Pow":
            rectified = producer(source, "Relu")
            if rectified is not None and scalar_of(node.inputs[1]) == 2.0 and rectified.inputs[0] is not None:
                return "relu2", rectified.inputs[0]
    return None


def merge_linears(edit: Editor, linears: list[ir.Node]) -> ir.Value:
    """Merge linears of the same input into one and return its output; their outputs become slices of it."""
    graph = edit.graph
    x = linears[0].inputs[0]
    weights = [node.inputs[1] for node in linears]
    name = edit.fresh_name("+".join(str(w.name) for w in weights if w is not None))
    merged = concatenated(graph, [w for w in weights if w is not None], name)
    biases = [node.inputs[2] if len(node.inputs) > 2 else None for node in linears]
    bias = None
    present = [b for b in biases if b is not None]
    if present:
        bias = concatenated(graph, present, edit.fresh_name("+".join(str(b.name) for b in present)))
    widths = [static_dims(w)[0] for w in weights if w is not None]
    shape = [shape_of(linears[0].outputs[0])[0], sum(widths)]
    gemm = edit.node("Gemm", [x, merged, bias], {"transB": 1}, shape=shape, stem="linear")
    split = edit.node(
        "Split", [gemm.outputs[0], edit.constant(widths)], {"axis": -1}, num_outputs=len(widths), stem="split"
    )
    edit.before(linears[0], gemm, split)
    for node, part in zip(linears, split.outputs, strict=True):
        part.shape = node.outputs[0].shape
        edit.substitute(node.outputs[0], part)
    return gemm.outputs[0]


def concatenated(graph: ir.Graph, weights: list[ir.Value], name: str, axis: int = 0) -> ir.Value:
    """Return an initializer that is `weights` one after the other along `axis`."""
    inputs = [ir.Value(name=expression_of(w).output) for w in weights]
    node = ir.node("Concat", inputs, {"axis": axis}, outputs=[ir.Value(name=name)])
    shape = static_dims(weights[0])
    shape[axis] = sum(static_dims(w)[axis] for w in weights)
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
    value.meta[WEIGHT] = combine(name, [expression_of(w) for w in weights], [node])
    graph.initializers[name] = value
    return value


def is_linear(node: ir.Node | None) -> bool:
    """Tell whether a node is a linear layer with a parameter as weight."""
    return node is not None and node.op_type == "Gemm" and is_weight(node.inputs[1])


def mergeable(linears: list[ir.Node]) -> bool:
    """Tell whether linears read one input and agree on having a bias."""
    return (
        len({id(node) for node in linears}) == len(linears)
        and len({id(node.inputs[0]) for node in linears}) == 1
        and len({len(node.inputs) for node in linears}) == 1
    )


def _halves(gate: ir.Value, up: ir.Value) -> tuple[ir.Value, str] | None:
    """Return `(x, layout)` if `gate` and `up` are the two halves of `x` along its last axis."""
    for op_type in ("Split", "Slice"):
        a, b = producer(gate, op_type), producer(up, op_type)
        if a is None or b is None or a.inputs[0] is not b.inputs[0] or gate is up:
            continue
        x = a.inputs[0]
        if x is None or x.shape is None or gate.shape is None or gate.shape[-1] != shape_of(up)[-1]:
            continue
        if op_type == "Split":
            if a is b and a.outputs[0] is gate and len(a.outputs) == 2:
                return x, "concat"
            continue
        layout = _slice_layout(a, b, dims(x)[-1])
        if layout is not None:
            return x, layout
    return None


def _slice_layout(a: ir.Node, b: ir.Node, width: int) -> str | None:
    values = [[scalar_of(v) for v in node.inputs[1:]] for node in (a, b)]
    rank_ = rank(a.outputs[0])
    if any(v[2] not in (-1, rank_ - 1) for v in values):
        return None
    starts = [int(v[0] or 0) for v in values]
    stops = [min(int(v[1] or 0), width) for v in values]
    steps = [int(v[3] or 1) if len(v) > 3 else 1 for v in values]
    if steps == [1, 1] and starts == [0, width // 2] and stops == [width // 2, width]:
        return "concat"
    if steps == [2, 2] and starts == [0, 1] and all(s >= width - 1 for s in stops):
        return "interleaved"
    return None


def fuse_gated_activations(model: ir.Model) -> int:
    """Fuse `activation(gate) * up` in place; returns how many were found."""
    edit = Editor(model.graph)
    count = 0
    for node in list(model.graph):
        if node.op_type != "Mul" or node.domain != "" or node.graph is None:
            continue
        for gated, up in (node.inputs, tuple(reversed(node.inputs))):
            found = activation_of(gated)
            if found is None or up is None:
                continue
            name, gate = found
            if name == "sigmoid" and gate is up:
                continue
            x, layout = _halves(gate, up) or (None, "concat")
            a, b = gate.producer(), up.producer()
            if x is None and a is not None and b is not None and is_linear(a) and is_linear(b) and mergeable([a, b]):
                if str(gate.shape) != str(up.shape):
                    continue
                x = merge_linears(edit, [a, b])
            if x is None:
                continue
            output = node.outputs[0]
            new = edit.node(
                "GatedActivation",
                [x],
                {"activation": name, "layout": layout, "alpha": 1.0, "limit": 0.0},
                domain=DOMAIN,
                shape=output.shape,
                stem="gated",
            )
            edit.substitute(output, edit.before(node, new))
            count += 1
            break
    drop_dead(model.graph)
    model.graph.sort()
    return count

"""Write every linear layer one way: `Gemm(x [T, K], weight [N, K], bias [N]?; transB=1)`.

The weight keeps the checkpoint's layout, output features first, so nothing is transposed on disk.
"""

from __future__ import annotations

import onnx_ir as ir

from inferencex.convert.passes.editing import WEIGHT, Editor, attribute, drop_dead, is_weight, rank, sole_user
from inferencex.convert.passes.weights import WeightExpression, combine, expression_of


def _is_swap(node: ir.Node) -> bool:
    return node.op_type == "Transpose" and list(attribute(node, "perm", [])) == [1, 0]


def transposed(graph: ir.Graph, weight: ir.Value) -> ir.Value:
    """Return the initializer that is `weight [K, N]` transposed; the checkpoint's own tensor where it already is."""
    expression = expression_of(weight)
    if expression.nodes and _is_swap(expression.nodes[-1]):
        inner = expression.nodes[:-1]
        source = expression.nodes[-1].inputs[0]
        assert source is not None
        result = WeightExpression(expression.parameters, str(source.name), inner, expression.constants)
    else:
        name = f"{weight.name}.transposed"
        swap = ir.node("Transpose", [ir.Value(name=expression.output)], {"perm": [1, 0]}, outputs=[ir.Value(name=name)])
        result = combine(name, [expression], [swap])
    name = result.output
    if name not in graph.initializers:
        assert weight.shape is not None
        value = ir.Value(
            name=name, shape=ir.Shape(list(reversed(list(weight.shape)))), type=ir.TensorType(ir.DataType.FLOAT)
        )
        value.meta[WEIGHT] = result
        graph.initializers[name] = value
    return graph.initializers[name]


def canonicalize_linears(model: ir.Model) -> int:
    """Rewrite matrix products with parameters as linears; returns how many there are."""
    graph = model.graph
    edit = Editor(graph)
    count = 0
    for node in list(graph):
        if node.op_type not in ("MatMul", "Gemm") or node.domain != "":
            continue
        x, weight = node.inputs[:2]
        assert x is not None
        if not is_weight(weight) or weight is None or rank(weight) != 2 or rank(x) != 2:
            continue
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        if node.op_type == "Gemm":
            plain = attribute(node, "alpha", 1.0) == 1.0 and attribute(node, "beta", 1.0) == 1.0
            if attribute(node, "transA", 0) or not plain:
                continue
        if not (node.op_type == "Gemm" and attribute(node, "transB", 0)):
            weight = transposed(graph, weight)
        output = node.outputs[0]
        after = sole_user(output)
        if bias is None and after is not None and after.op_type == "Add":
            other = after.inputs[1] if after.inputs[0] is output else after.inputs[0]
            if other is not None and is_weight(other) and rank(other) == 1:
                bias, output = other, after.outputs[0]
        new = edit.node("Gemm", [x, weight, bias], {"transB": 1}, shape=output.shape, stem="linear")
        anchor = output.producer()
        assert anchor is not None
        edit.substitute(output, edit.before(anchor, new))
        count += 1
    drop_dead(graph)
    return count

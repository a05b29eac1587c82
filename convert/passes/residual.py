"""Fuse a residual addition with the normalization that reads the sum."""

from __future__ import annotations

import onnx_ir as ir

from inferencex.convert.passes.editing import Editor, attribute, drop_dead, is_weight, rank
from inferencex.formats.dialect.schemas import DOMAIN

_FUSED = {"RMSNormalization": "AddRMSNormalization", "LayerNormalization": "AddLayerNormalization"}


def fuse_residual_norms(model: ir.Model) -> int:
    """Fuse in place; returns how many. Other readers of the sum read the fused node's second output."""
    graph = model.graph
    edit = Editor(graph)
    count = 0
    for node in list(graph):
        if node.op_type not in _FUSED or node.domain != "":
            continue
        total = node.inputs[0]
        add = None if total is None else total.producer()
        if total is None or add is None or add.op_type != "Add" or rank(total) != 2:
            continue
        x, residual = add.inputs
        if x is None or residual is None or str(x.shape) != str(residual.shape) or is_weight(x) or is_weight(residual):
            continue
        if attribute(node, "axis", -1) not in (-1, 1):
            continue
        new = edit.node(
            _FUSED[node.op_type],
            [residual, x, *node.inputs[1:]] if _runs_longer(x, residual) else [x, residual, *node.inputs[1:]],
            {"epsilon": float(attribute(node, "epsilon", 1e-5))},
            domain=DOMAIN,
            num_outputs=2,
            shape=total.shape,
            stem=str(node.outputs[0].name),
        )
        new.outputs[1].shape = total.shape
        graph.insert_before(add, [new])
        node.outputs[0].replace_all_uses_with(new.outputs[0], replace_graph_outputs=True)
        total.replace_all_uses_with(new.outputs[1], replace_graph_outputs=True)
        graph.remove(node, safe=True)
        graph.remove(add, safe=True)
        count += 1
    drop_dead(graph)
    if count:
        graph.sort()
    return count


def _runs_longer(x: ir.Value, residual: ir.Value) -> bool:
    """Whether `x` is the residual stream: the sum of earlier additions, or the value with more readers."""
    producer = x.producer()
    if producer is not None and producer.op_type in ("AddRMSNormalization", "AddLayerNormalization", "Gather"):
        return True
    return len(x.uses()) > len(residual.uses())

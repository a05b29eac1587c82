"""Remove reshapes, transposes and casts that undo each other, with onnxscript's rewrite rules and one of our own."""

from __future__ import annotations

import onnx_ir as ir
from onnxscript.rewriter import rewrite
from onnxscript.rewriter.rules.common import (
    cast_cast_rule,
    no_op_cast_rule,
    no_op_expand_rule,
    no_op_transpose_rule,
    transpose_transpose_rule,
)

from inferencex.convert.passes.editing import Editor, dims, drop_dead

_RULES = [cast_cast_rule, no_op_cast_rule, no_op_expand_rule, no_op_transpose_rule, transpose_transpose_rule]
_RESHAPES = {"Reshape", "Squeeze", "Unsqueeze", "Flatten"}


def remove_no_ops(model: ir.Model) -> int:
    """Clean in place; returns how many nodes went."""
    before = len(model.graph)
    rewrite(model, pattern_rewrite_rules=_RULES)
    _merge_reshapes(model.graph)
    drop_dead(model.graph)
    return before - len(model.graph)


def _merge_reshapes(graph: ir.Graph) -> None:
    """Let every reshape read what the reshape before it read, and drop those that change nothing."""
    edit = Editor(graph)
    for node in list(graph):
        if node.op_type == "Identity" and node.inputs[0] is not None and not node.outputs[0].is_graph_output():
            node.outputs[0].replace_all_uses_with(node.inputs[0])
            continue
        if node.op_type not in _RESHAPES or node.domain != "" or node.outputs[0].shape is None:
            continue
        shape = dims(node.outputs[0])
        if shape.count(-1) > 1:
            continue
        source = node.inputs[0]
        while source is not None:
            inner = source.producer()
            if inner is None or inner.op_type not in _RESHAPES or inner.domain != "":
                break
            source = inner.inputs[0]
        if source is None or source.shape is None:
            continue
        output = node.outputs[0]
        if str(list(source.shape)) == str(list(output.shape or [])) and not output.is_graph_output():
            output.replace_all_uses_with(source)
        elif source is not node.inputs[0]:
            new = edit.node(
                "Reshape",
                [source, edit.constant(shape)],
                shape=list(output.shape or []),
                dtype=output.dtype,
                stem="reshape",
            )
            edit.substitute(output, edit.before(node, new))

"""Merge the query, key and value projections of an attention layer into one linear."""

from __future__ import annotations

import onnx_ir as ir

from inferencex.convert.passes.editing import Editor, drop_dead
from inferencex.convert.passes.gating import is_linear, merge_linears, mergeable
from inferencex.formats.dialect.schemas import DOMAIN

# What may stand between a projection and attention: shapes, positions, and norms of heads.
_BETWEEN = {
    "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity", "RotaryEmbedding", "RMSNormalization",
    "LayerNormalization", "Clip", "Mul", "Concat", "Slice", "Split", "Neg", "Add", "Sub", "Expand", "Min", "Max", "Div",
}  # fmt: skip


def _projection(value: ir.Value | None) -> ir.Node | None:
    """Walk back from an input of attention to the one linear it comes from, or None."""
    found: dict[int, ir.Node] = {}
    seen: set[ir.Value] = set()
    pending = [value]
    while pending:
        current = pending.pop()
        if current is None or current in seen:
            continue
        seen.add(current)
        node = current.producer()
        if node is None:
            continue
        if is_linear(node):
            found[id(node)] = node
        elif node.domain == "" and node.op_type in _BETWEEN:
            pending.extend(node.inputs)
        elif node.op_type not in ("Constant", "Gather", "Cast", "Cos", "Sin"):
            return None
    return next(iter(found.values())) if len(found) == 1 else None


def merge_projections(model: ir.Model) -> int:
    """Merge in place; returns how many attention layers got one fused projection."""
    edit = Editor(model.graph)
    count = 0
    for node in list(model.graph):
        if node.domain != DOMAIN or node.op_type != "Attention":
            continue
        linears = list(dict.fromkeys(p for p in map(_projection, node.inputs[:3]) if p is not None))
        if len(linears) < 2:
            continue
        groups: dict[int, list[ir.Node]] = {}
        for linear in linears:
            groups.setdefault(id(linear.inputs[0]), []).append(linear)
        for group in groups.values():
            if len(group) > 1 and mergeable(group):
                merge_linears(edit, group)
                count += 1
    drop_dead(model.graph)
    model.graph.sort()
    return count

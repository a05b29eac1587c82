"""Compute only the rows whose logits are wanted, from as early in the graph as possible.

Captured graphs pick the sampled rows in front of the head. Everything after the last attention works on each token
alone, so the rows can be picked right there: the last feed-forward layer, the final norm and the head then see only
tokens that are sampled, a handful in a prompt of thousands.
"""

from __future__ import annotations

import onnx_ir as ir

from inferencex.convert.passes.editing import Editor, attribute, drop_dead, rank, shape_of
from inferencex.convert.passes.elementwise import ELEMENTWISE
from inferencex.formats.dialect.schemas import DOMAIN

_ROWWISE_CUSTOM = {"GatedActivation", "AddRMSNormalization", "AddLayerNormalization", "Experts"}


def _moves_with_rows(node: ir.Node, tokens: str) -> bool:
    """Tell whether a node computes each row of its outputs from the same row of its inputs."""
    if any(not _rows(v, tokens) for v in node.outputs):
        return False
    if node.domain == DOMAIN:
        return node.op_type in _ROWWISE_CUSTOM
    if node.op_type in ("RMSNormalization", "LayerNormalization", "Softmax", "LogSoftmax", "TopK"):
        return int(attribute(node, "axis", -1)) == -1
    return node.op_type in ELEMENTWISE or node.op_type in ("Gemm", "MatMul")


def _rows(value: ir.Value | None, tokens: str) -> bool:
    """Tell whether the first of a value's axes, and no other, is the tokens."""
    if value is None or value.shape is None or not len(value.shape):
        return False
    names = [str(d) for d in value.shape]
    return names[0] == tokens and names.count(tokens) == 1


def _carries_rows(node: ir.Node, value: ir.Value, tokens: str) -> bool:
    """Tell whether an input has the rows of the node's output; the right matrix of a plain product does not."""
    shared = node.op_type in ("Gemm", "MatMul") and value is node.inputs[1] and rank(value) == 2
    return _rows(value, tokens) and not shared


def gather_rows_early(model: ir.Model) -> int:
    """Move the Gather of `logit_rows` up in place; returns how many nodes it passed."""
    graph = model.graph
    rows = next(v for v in graph.inputs if v.name == "logit_rows")
    tokens = str(shape_of(next(v for v in graph.inputs if v.name == "token_ids"))[0])
    gathers = [n for n in graph if n.op_type == "Gather" and n.inputs[1] is rows and int(attribute(n, "axis", 0)) == 0]
    if len(gathers) != 1:
        return 0
    gather = gathers[0]
    head_input = gather.inputs[0]
    if head_input is None:
        return 0
    edit = Editor(graph)
    picked = {head_input: None}  # in the order of the graph, so that the result is the same every time
    inside: set[ir.Node] = set()
    for node in reversed(list(graph)):  # a node moves if every reader of what it computes does
        wanted = [v for v in node.outputs if v.uses() or v.is_graph_output()]
        if not wanted or not _moves_with_rows(node, tokens):
            continue
        readers = {u.node for v in wanted for u in v.uses()}
        if all(reader is gather or reader in inside for reader in readers) and not any(
            v.is_graph_output() for v in wanted
        ):
            inside.add(node)
            picked.update({v: None for v in node.inputs if v is not None and _carries_rows(node, v, tokens)})
    if not inside:
        return 0
    kept = shape_of(rows)[0]
    frontier = [v for v in picked if v.producer() not in inside]
    for value in frontier:
        assert value.shape is not None
        pick = edit.node(
            "Gather",
            [value, rows],
            {"axis": 0},
            shape=[kept, *list(value.shape)[1:]],
            dtype=value.dtype,
            stem=f"{value.name}_rows",
        )
        source = value.producer()
        if source is None:
            graph.insert_before(next(iter(graph)), [pick])
        else:
            graph.insert_after(source, [pick])
        for use in list(value.uses()):
            if use.node in inside or use.node is gather:
                use.node.replace_input_with(use.idx, pick.outputs[0])
    for node in inside:
        for value in node.outputs:
            assert value.shape is not None
            value.shape = ir.Shape([kept, *list(value.shape)[1:]])
    last = gather.inputs[0]
    assert last is not None
    if last.producer() is not gather and last not in frontier:
        gather.outputs[0].replace_all_uses_with(last, replace_graph_outputs=True)
    drop_dead(graph)
    graph.sort()
    return len(inside)

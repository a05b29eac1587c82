"""What every weight of a graph is for, found from the graph."""

from __future__ import annotations

import onnx_ir as ir

from inferencex.convert.passes.editing import is_weight, static_dims
from inferencex.convert.quantize.plan import Role, WeightInfo
from inferencex.formats.dialect.schemas import DOMAIN

# A router's scores pass through these on their way to the choice of experts.
_SCORING = {
    "Softmax",
    "Sigmoid",
    "Add",
    "Mul",
    "Div",
    "Reshape",
    "Cast",
    "Tanh",
    "Sqrt",
    "Softplus",
    "Relu",
    "ReduceSum",
    "Where",
    "Sub",
    "Identity",
}


def _chooses_experts(node: ir.Node) -> bool:
    """Tell whether a linear's output becomes a choice of experts without another linear between."""
    seen: set[ir.Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        for user in (use.node for output in current.outputs for use in output.uses()):
            if user in seen:
                continue
            seen.add(user)
            if user.op_type == "TopK":
                return True
            if user.domain == "" and user.op_type in _SCORING:
                pending.append(user)
    return False


def _feeds_logits(node: ir.Node) -> bool:
    """Tell whether a linear is the last one before the logits, which may still be scaled or capped."""
    pending, seen = [node], {node}
    while pending:
        current = pending.pop()
        for output in current.outputs:
            if output.is_graph_output():
                return True
            for use in output.uses():
                if use.node.op_type in ("Gemm", "MatMul", "Attention", "Experts", "ExpertLinear", "GatedActivation"):
                    return False
                if use.node not in seen:
                    seen.add(use.node)
                    pending.append(use.node)
    return False


def _role(weight: ir.Value, node: ir.Node, index: int) -> Role | None:
    if node.op_type == "Gemm" and index == 1:
        if _feeds_logits(node):
            return "head"
        return "router" if _chooses_experts(node) else "linear"
    if node.op_type == "Gather" and index == 0 and node.inputs[1] is not None:
        indices = node.inputs[1]
        return "embedding" if indices.is_graph_input() and indices.name == "token_ids" else None
    if node.domain == DOMAIN and node.op_type in ("Experts", "ExpertLinear") and weight.shape is not None:
        return "experts" if len(weight.shape) == 3 else None
    return None


def weight_roles(model: ir.Model) -> list[WeightInfo]:
    """List the weights that can be quantized, in the order of the graph.

    A tensor that serves as embedding and as head appears twice: as itself, and as `NAME (head)` tied to it. A weight
    with a further use (added, scaled, sliced by the graph) is left out, because it must stay plain.
    """
    found: list[WeightInfo] = []
    for name, value in model.graph.initializers.items():
        if not is_weight(value) or value.shape is None:
            continue
        roles = [_role(value, use.node, use.idx) for use in value.uses()]
        if not roles or any(role is None for role in roles):
            continue
        distinct = list(dict.fromkeys(role for role in roles if role is not None))
        shape = tuple(static_dims(value))
        if len(distinct) == 1:
            found.append(WeightInfo(name, shape, distinct[0]))
        elif set(distinct) == {"embedding", "head"}:
            found.append(WeightInfo(name, shape, "embedding"))
            found.append(WeightInfo(head_name(name), shape, "head", tied_to=name))
    return found


def head_name(embedding: str) -> str:
    """Name the head that is tied to an embedding."""
    return f"{embedding} (head)"

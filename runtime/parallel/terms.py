"""Where terms are added up: as late as possible, for a sum of sums, and what only scales it, costs no more."""

from __future__ import annotations

from collections.abc import Mapping

from inferencex.formats.graph import Node, Value
from inferencex.runtime.parallel.graph_facts import GraphFacts
from inferencex.runtime.parallel.roles import Role

_ARRANGING = ("Reshape", "Squeeze", "Unsqueeze", "Transpose", "Flatten", "Identity", "ReduceSum", "Gather")
_SUMS = (Role.SUM, Role.SUM_BY_EXPERT, Role.SUM_BY_ROW)


def summed_values(facts: GraphFacts, roles: Mapping[Node, Role]) -> frozenset[str]:
    """Return the names of the values whose terms the ranks have to add up.

    A node whose result is linear in terms gives terms itself: the sum of two values that are both made of terms, terms
    times or divided by something that every rank has whole, terms in another order.
    """
    pending: set[str] = set()
    summed: set[str] = set()
    outputs = {value.name for value in facts.graph.outputs}
    for node in facts.graph:
        if roles.get(node) in _SUMS:
            pending.add(node.outputs[0].name)
            continue
        of_terms = {value.name for value in node.inputs if value is not None and value.name in pending - summed}
        if not of_terms:
            continue
        if node not in roles and _is_linear(node, of_terms, outputs):
            pending.add(node.outputs[0].name)
        else:
            summed |= of_terms
    return frozenset(summed | (pending & outputs))


def _is_linear(node: Node, of_terms: set[str], outputs: set[str]) -> bool:
    if node.domain != "":
        return False
    read = [value for value in node.inputs if value is not None and value.name in of_terms]
    if any(not _read_once(value, node, outputs) for value in read):
        return False
    if node.op_type == "Add":
        return len(of_terms) == 2
    if node.op_type == "Mul":
        return len(read) == 1
    if node.op_type == "Div" or node.op_type in _ARRANGING:
        return len(read) == 1 and node.inputs[0] is not None and node.inputs[0].name in of_terms
    return False


def _read_once(value: Value, node: Node, outputs: set[str]) -> bool:
    return len(value.consumers()) == 1 and value.consumers()[0] is node and value.name not in outputs

"""What becomes of the weights of a graph that is divided, and how many bytes of them a rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from inferencex.formats.dialect.names import DOMAIN
from inferencex.formats.graph import Node
from inferencex.runtime.parallel.graph_facts import GraphFacts
from inferencex.runtime.parallel.parts import Part, Shape, count
from inferencex.runtime.parallel.roles import Role, Weight
from inferencex.runtime.parallel.rules import Needs
from inferencex.runtime.parallel.rules.products import weight_place


def table_rows(node: Node, facts: GraphFacts) -> int:
    """Return how many rows a lookup chooses from; 0 for one that is no lookup of rows of numbers."""
    table, axis = node.inputs[0], node.attributes.get_int("axis", 0)
    shape = None if table is None else facts.shape(table)
    ids = None if node.inputs[1] is None else facts.shape(node.inputs[1])
    if shape is None or ids is None or len(shape) != 2 or len(ids) != 1 or axis not in (0, -2):
        return 0
    return shape[0] if isinstance(shape[0], int) else 0


def weights_of(
    facts: GraphFacts, roles: Mapping[Node, Role], needs: Mapping[Node, Sequence[Needs]]
) -> tuple[Weight, ...]:
    """Return what became of every fixed matrix that is multiplied with, or looked up in."""
    found: dict[tuple[str, str], Weight] = {}
    for node in facts.graph:
        kind, role = (node.domain, node.op_type), roles.get(node)
        own = weight_place(node, facts)
        places = [] if own is None else [own]
        if kind == (DOMAIN, "Experts"):
            places = [3, 4]
        elif kind == ("", "Gather") and facts.is_static(node.inputs[0]) and table_rows(node, facts):
            places = [0]
        for place in places:
            value = node.inputs[place]
            if value is None:
                continue
            how, why = _how(node, role, place)
            name = facts.stored_name(value)
            shares = [_share(of_rank.inputs[place], facts.shape(value)) for of_rank in needs.get(node, ())]
            nbytes = facts.nbytes(value)
            found.setdefault((name, how), Weight(name, nbytes, int(nbytes * max(shares, default=1.0)), how, why))
    return tuple(found.values())


def _share(part: Part | None, shape: Shape | None) -> float:
    """Return how much of a matrix a part is."""
    share = 1.0
    for ranges, size in zip(part or (), shape or (), strict=False):
        if ranges is not None and isinstance(size, int):
            share *= count(ranges) / size
    return share


def _how(node: Node, role: Role | None, place: int) -> tuple[str, str]:
    if role is Role.SUM_BY_EXPERT:
        return "experts", ""
    if role is None:
        if node.op_type == "Gather":
            return "", "a step reads only the rows of its tokens"
        return "", "what follows it needs all of its result, and what it reads is not computed in parts"
    if role in (Role.PART, Role.GATHERED, Role.SUM_BY_ROW) or (node.op_type == "Experts" and place == 3):
        return "rows", ""
    return "columns", ""

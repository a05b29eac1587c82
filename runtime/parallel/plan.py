"""Plan from a graph alone how ranks share it: what each computes, and where they exchange results.

The unit is a pair of products: the second (a linear, whose inputs' columns are divided) needs of its input only the
columns that a rank has, and so does everything in front of it, back to products whose weights' rows can be divided.
Nothing here knows of architectures; attention, gates, norms of single heads and rearrangements lie on the way, and what
has no rule ends it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from inferencex.formats.dialect.names import DOMAIN
from inferencex.formats.errors import OptionError
from inferencex.formats.graph import Graph, Node
from inferencex.runtime.backends.head import find_head
from inferencex.runtime.parallel.demands import Demands
from inferencex.runtime.parallel.graph_facts import GraphFacts
from inferencex.runtime.parallel.parts import Ranges, even_cuts, scaled
from inferencex.runtime.parallel.roles import Plan, PlanOptions, Role
from inferencex.runtime.parallel.rules import RULES, Needs
from inferencex.runtime.parallel.rules.attention import kv_heads_of
from inferencex.runtime.parallel.rules.contract import unchanged
from inferencex.runtime.parallel.rules.products import (
    experts_by_expert,
    experts_by_width,
    features_axis,
    row_parallel,
    weight_place,
)
from inferencex.runtime.parallel.terms import summed_values
from inferencex.runtime.parallel.weights import table_rows, weights_of

MAX_SIZE = 64
"""Most ranks."""

_TRIED_SIZES = (*range(1, 17), 20, 24, 32, 40, 48, MAX_SIZE)
_DEFAULT = PlanOptions()


def plan_graph(graph: Graph, size: int, options: PlanOptions = _DEFAULT) -> Plan:
    """Plan how `size` ranks share a graph of the IR dialect.

    Raises OptionError, naming the sizes that are possible, where heads, feed-forward layers or groups of quantized
    weights do not divide among so many.
    """
    if not 1 <= size <= MAX_SIZE:
        raise OptionError(f"tensor_parallel_size={size}; expected 1 to {MAX_SIZE}")
    facts = GraphFacts(graph)
    plan, refusals = _try(facts, size, options)
    if refusals:
        possible = [str(tried) for tried in _TRIED_SIZES if not _try(facts, tried, options)[1]]
        raise OptionError(
            f"tensor_parallel_size={size}: {refusals[0]}, which cannot be divided among {size}; possible sizes are "
            f"{', '.join(possible)}"
        )
    return plan


def _try(facts: GraphFacts, size: int, options: PlanOptions) -> tuple[Plan, list[str]]:
    """Return the plan, and what does not divide."""
    sums, uneven = _sums(facts, size) if size > 1 else ({}, {})
    forced, refused = _forced(facts, size, options)
    blocked: frozenset[Node] = frozenset()
    while True:
        found = Demands(facts, size, sums, forced, blocked)
        refused += [
            text for text, nbytes in found.refusals.items() if nbytes >= options.least_bytes and text not in refused
        ]
        poor = {
            node
            for node in sums
            if found.roles.get(node) is Role.SUM and found.support[node] + _own_bytes(node, facts) < options.least_bytes
        } | {node for node in sums if found.roles.get(node) is Role.SUM and not found.support[node]}
        contradictory = _sharing_differently(facts.graph, found.needs) - blocked
        if not poor and not contradictory:
            break
        sums = {node: needs for node, needs in sums.items() if node not in poor}
        blocked |= contradictory
    refused += [text for node, text in uneven.items() if found.roles.get(node) is Role.SUM]
    roles = dict(reversed(list(found.roles.items())))
    plan = Plan(
        graph=facts.graph,
        size=size,
        roles=roles,
        needs=found.needs,
        parts=found.parts,
        summed=summed_values(facts, roles),
        weights=weights_of(facts, roles, found.needs),
    )
    return plan, refused if size > 1 else []


def _own_bytes(node: Node, facts: GraphFacts) -> int:
    place = weight_place(node, facts)
    return 0 if place is None else facts.nbytes(node.inputs[place])


def _sums(facts: GraphFacts, size: int) -> tuple[dict[Node, Sequence[Needs]], dict[Node, str]]:
    """Return products whose terms could be added up, and of those that do not divide evenly what their sizes are."""
    found: dict[Node, Sequence[Needs]] = {}
    uneven: dict[Node, str] = {}
    head = _head(facts)
    for node in facts.graph:
        place = weight_place(node, facts)
        weight = None if place is None else node.inputs[place]
        shape = None if weight is None else facts.shape(weight)
        if weight is None or shape is None or node is head or facts.shape(node.outputs[0]) is None:
            continue
        axis = features_axis(node)
        features = shape[axis]
        if not isinstance(features, int):
            continue
        cuts, text = _cuts(features, facts.unit_along(weight, axis), size)
        found[node] = [row_parallel(node, columns, facts, has_bias=rank == 0) for rank, columns in enumerate(cuts)]
        if text:
            uneven[node] = f"the weight {facts.stored_name(weight)!r} has {text}"
    return found, uneven


def _cuts(features: int, unit: int, size: int) -> tuple[list[Ranges], str]:
    """Return columns for each rank, and a text where ranks get unequal ones, or none."""
    units = -(-features // unit)
    cuts = [scaled(ranges, unit) or () for ranges in even_cuts(units, size)]
    cuts = [tuple((start, min(stop, features)) for start, stop in ranges) for ranges in cuts]
    even = units % size == 0 and (features % unit == 0)
    text = f"{features} input features" + (f" in groups of {unit}" if unit > 1 else "")
    return cuts, "" if even else text


def _forced(
    facts: GraphFacts, size: int, options: PlanOptions
) -> tuple[dict[Node, tuple[Role, Sequence[Needs]]], list[str]]:
    """Return the head, tables of embeddings and layers of experts with what each rank needs, and what is refused."""
    found: dict[Node, tuple[Role, Sequence[Needs]]] = {}
    refused: list[str] = []
    if size == 1:
        return found, refused
    head = _head(facts)
    for node in facts.graph:
        kind = (node.domain, node.op_type)
        if node is head:
            needs = _by_vocabulary(node, facts, size) if _own_bytes(node, facts) >= options.least_bytes else None
            if needs is not None:
                found[node] = (Role.GATHERED, needs)
        elif kind == ("", "Gather") and facts.is_static(node.inputs[0]) and not facts.is_static(node.inputs[1]):
            rows = table_rows(node, facts)
            if rows >= size and facts.nbytes(node.inputs[0]) >= options.embedding_bytes:
                found[node] = (Role.SUM_BY_ROW, [_by_row(node, cut, facts) for cut in even_cuts(rows, size)])
        elif kind == (DOMAIN, "Experts"):
            if facts.nbytes(node.inputs[3]) + facts.nbytes(node.inputs[4]) < options.least_bytes:
                continue
            role, of_ranks, text = _experts(node, facts, size)
            if of_ranks:
                found[node] = (role, of_ranks)
            elif text:
                refused.append(text)
    return found, refused


def _head(facts: GraphFacts) -> Node | None:
    head = find_head(facts.graph.outputs[0], facts.is_static) if facts.graph.outputs else None
    if head is None:
        return None
    return next((node for node in facts.graph if node is head.node), None)


def _by_vocabulary(node: Node, facts: GraphFacts, size: int) -> Sequence[Needs] | None:
    shape = facts.shape(node.outputs[0])
    rows = shape[-1] if shape else None
    if shape is None or not isinstance(rows, int) or rows < size:
        return None
    rule = RULES[node.domain, node.op_type]
    found = [rule(node, [(*(None,) * (len(shape) - 1), cut)], facts) for cut in even_cuts(rows, size)]
    needs = [of_rank for of_rank in found if of_rank is not None]
    return needs if len(needs) == size else None


def _by_row(node: Node, rows: Ranges, facts: GraphFacts) -> Needs:
    return Needs(((rows, None), unchanged(node, facts)[1]))


def _experts(node: Node, facts: GraphFacts, size: int) -> tuple[Role, Sequence[Needs], str]:
    """Divide a layer of experts by its width, else by experts; a text says why it cannot be divided so."""
    gate_up, down = node.inputs[3], node.inputs[4]
    shape = None if down is None else facts.shape(down)
    if gate_up is None or down is None or shape is None or not isinstance(shape[0], int):
        return Role.SUM, [], ""
    experts, width = shape[0], shape[2]
    if not isinstance(width, int):
        return Role.SUM, [], ""
    cuts, uneven = _cuts(width, facts.unit_along(down, 2), size)
    if not uneven:
        return (
            Role.SUM,
            [experts_by_width(node, cut, width, facts, has_bias=rank == 0) for rank, cut in enumerate(cuts)],
            "",
        )
    if experts % size == 0:
        return Role.SUM_BY_EXPERT, [experts_by_expert(node, cut, facts) for cut in even_cuts(experts, size)], ""
    text = f"the layer {facts.stored_name(down)!r} has {experts} experts and their weights {uneven}"
    return Role.SUM, [], text


def _sharing_differently(graph: Graph, needs: Mapping[Node, Sequence[Needs]]) -> frozenset[Node]:
    """Return the attention nodes of layers whose state would not be divided in the same way by all that use it."""
    by_layer: dict[int, list[Node]] = {}
    for node in graph:
        if (node.domain, node.op_type) == (DOMAIN, "Attention"):
            by_layer.setdefault(node.attributes.get_int("layer"), []).append(node)
    different: set[Node] = set()
    for nodes in by_layer.values():
        kept = [[kv_heads_of(of_rank) for of_rank in needs[node]] if node in needs else None for node in nodes]
        if any(heads != kept[0] for heads in kept):
            different.update(nodes)
    return frozenset(different)

"""One walk through a graph from its end: which parts of every value the ranks need, and so what they compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from inferencex.formats.dialect.names import DOMAIN
from inferencex.formats.graph import Node, Value
from inferencex.runtime.parallel.graph_facts import GraphFacts
from inferencex.runtime.parallel.parts import Part, is_whole, union, whole
from inferencex.runtime.parallel.roles import Role
from inferencex.runtime.parallel.rules import RULES, IndivisibleError, Needs
from inferencex.runtime.parallel.rules.contract import unchanged
from inferencex.runtime.parallel.rules.products import weight_place

RankParts = Sequence[Part]


class Demands:
    """The walk, and what it finds.

    sums:    nodes whose terms may be added up, with what each rank then needs of their inputs
    forced:  nodes that are divided in another way, likewise
    blocked: nodes that are not to be computed in part

    Of a value that several nodes read, ranks compute the least part that holds what all of them want.

    roles, needs, parts: as in `Plan`
    support:    bytes of the weights that are divided for the sake of each of `sums`
    refusals:   what says that the graph can be divided, but not into so many parts
    """

    def __init__(
        self,
        facts: GraphFacts,
        size: int,
        sums: Mapping[Node, Sequence[Needs]],
        forced: Mapping[Node, tuple[Role, Sequence[Needs]]],
        blocked: frozenset[Node],
    ) -> None:
        self.roles: dict[Node, Role] = {}
        self.needs: dict[Node, Sequence[Needs]] = {}
        self.parts: dict[str, RankParts] = {}
        self.support: dict[Node, int] = dict.fromkeys(sums, 0)
        self.refusals: dict[str, int] = {}
        self._facts, self._size = facts, size
        self._sums, self._forced, self._blocked = sums, forced, blocked
        self._wanted: dict[str, RankParts] = {}
        self._causes: dict[str, set[Node]] = {}
        for value in facts.graph.outputs:
            self._want(value, [whole(len(facts.shape(value) or ()))] * size, set())
        for node in reversed(facts.graph.nodes):
            if not facts.is_static_node(node):
                self._visit(node)

    def _visit(self, node: Node) -> None:
        wanted = [self._wanted.get(value.name) for value in node.outputs]
        if all(parts is None for parts in wanted) or self._facts.is_known_shape(node):
            return
        is_partial = any(parts is not None and not all(map(is_whole, parts)) for parts in wanted)
        needs: Sequence[Needs] | None = None
        if node in self._forced and not is_partial:
            self.roles[node], needs = self._forced[node]
        elif node in self._sums and not is_partial:
            self.roles[node], needs = Role.SUM, self._sums[node]
        elif is_partial or _selects(node):
            needs = self._in_part(node, wanted)
            if needs is not None and not is_partial and all(map(_reads_all, needs)):
                needs = None
        causes: set[Node] = set().union(*(self._causes.get(value.name, ()) for value in node.outputs))
        if needs is None:
            whole_inputs = unchanged(node, self._facts)
            needs = [Needs(tuple(whole_inputs))] * self._size
        else:
            self.needs[node] = needs
            if self.roles.setdefault(node, Role.PART) is Role.PART:
                for value, parts in zip(node.outputs, wanted, strict=True):
                    if parts is not None:
                        self.parts[value.name] = parts
                self._credit(node, causes)
            elif node in self._sums:
                causes = {node}
        for place, source in enumerate(node.inputs):
            of_ranks = [of_rank.inputs[place] for of_rank in needs]
            if source is None or self._facts.is_static(source) or any(place in of_rank.constants for of_rank in needs):
                continue
            shape = self._facts.shape(source)
            # An input that some rank does without, such as one of several that are put together, is still made by all.
            empty: Part = tuple(() if isinstance(size, int) else None for size in shape or ())
            if any(part is not None for part in of_ranks):
                self._want(source, [empty if part is None else part for part in of_ranks], causes)

    def _in_part(self, node: Node, wanted: Sequence[RankParts | None]) -> Sequence[Needs] | None:
        """Return what each rank needs for its part of the outputs; None where it has to compute them whole."""
        rule = RULES.get((node.domain, node.op_type))
        if rule is None or node in self._blocked:
            return None
        found: list[Needs] = []
        for rank in range(self._size):
            parts = [None if of_ranks is None else of_ranks[rank] for of_ranks in wanted]
            if not _selects(node) and all(part is None or is_whole(part) for part in parts):
                found.append(Needs(tuple(unchanged(node, self._facts))))
                continue
            if all(part is None or () in part for part in parts):  # nothing of it: this rank does without the node
                found.append(Needs((None,) * len(node.inputs)))
                continue
            try:
                needs = rule(node, parts, self._facts)
            except IndivisibleError as error:
                causes = set().union(*(self._causes.get(value.name, ()) for value in node.outputs))
                self.refusals[str(error)] = sum(map(self._weight_bytes, causes))
                return None
            if needs is None:
                return None
            found.append(needs)
        return found

    def _credit(self, node: Node, causes: set[Node]) -> None:
        """Count what is saved by computing a node in part."""
        nbytes = self._weight_bytes(node)
        if (node.domain, node.op_type) == (DOMAIN, "Attention"):
            nbytes = 1  # its state is divided, whatever the weights are
        for cause in causes:
            self.support[cause] += nbytes

    def _weight_bytes(self, node: Node) -> int:
        place = weight_place(node, self._facts)
        return 0 if place is None else self._facts.nbytes(node.inputs[place])

    def _want(self, value: Value, parts: RankParts, causes: set[Node]) -> None:
        shape = self._facts.shape(value)
        before = self._wanted.get(value.name)
        if shape is None:
            parts = [whole(len(part)) for part in parts]
        elif before is not None:
            parts = [union(one, other, shape) for one, other in zip(before, parts, strict=True)]
        self._wanted[value.name] = parts
        self._causes.setdefault(value.name, set()).update(causes)


def _selects(node: Node) -> bool:
    """Tell whether a node may have no use for some of its input, even where all of its output is wanted."""
    return node.domain == "" and node.op_type in ("Gather", "Slice", "Split")


def _reads_all(needs: Needs) -> bool:
    return needs.inputs[0] is not None and is_whole(needs.inputs[0])

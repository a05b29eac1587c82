"""What becomes of the nodes of a graph that is divided, and the plan that says so of all of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from inferencex.formats.graph import Graph, Node
from inferencex.runtime.parallel.parts import Part
from inferencex.runtime.parallel.rules import Needs


class Role(Enum):
    """What every rank computes of a node that is divided; those without a role are computed whole by every rank."""

    PART = "part"
    """A part of the outputs, from parts of the inputs."""
    SUM = "sum"
    """A term of the outputs, from parts of the inputs: the terms of all ranks add up to them."""
    SUM_BY_EXPERT = "sum by expert"
    """The same, of a layer of experts, from some of the experts."""
    SUM_BY_ROW = "sum by row"
    """The same, of a lookup in a table, from some of its rows."""
    GATHERED = "gathered"
    """A part of the outputs, of which every rank then gets all."""


@dataclass(frozen=True)
class Weight:
    """A fixed matrix or stack of matrices.

    name:   of the tensor that it is stored as
    nbytes: with its scales and zero points
    held:   of them, by the rank that holds most
    how:    how it is divided: "rows", "columns" (of which the results are added up), "experts"; "" where it is whole
    why:    why it is whole; "" where it is not
    """

    name: str
    nbytes: int
    held: int
    how: str
    why: str = ""


@dataclass(frozen=True)
class PlanOptions:
    """What is worth dividing.

    least_bytes:     of the weights of a pair of products: less than this stays whole, for adding up costs more time
    embedding_bytes: of a table of embeddings: less than this stays whole, for a step reads only few of its rows
    """

    least_bytes: int = 64 << 10
    embedding_bytes: int = 64 << 20


@dataclass(frozen=True, eq=False)
class Plan:
    """How a graph is divided among `size` ranks.

    roles:   of the nodes that are divided
    needs:   of those nodes, what each rank needs of their inputs
    parts:   by name, the part that each rank has of a value; values that are not listed are whole
    summed:  names of the values whose terms have to be added up
    weights: every fixed matrix that is multiplied with, or looked up in
    """

    graph: Graph
    size: int
    roles: Mapping[Node, Role]
    needs: Mapping[Node, Sequence[Needs]]
    parts: Mapping[str, Sequence[Part]]
    summed: frozenset[str]
    weights: tuple[Weight, ...]

    @property
    def whole_bytes(self) -> int:
        """Bytes of weights that every rank holds whole."""
        return sum(weight.nbytes for weight in self.weights if not weight.how)

    @property
    def held_bytes(self) -> int:
        """Bytes of weights that a rank holds, at most."""
        return sum(weight.held for weight in self.weights)

    def digest(self) -> str:
        """Return a hash of everything that the ranks have to agree about."""
        entries = [
            [node.outputs[0].name, role.value, [[needs.inputs, sorted(needs.attributes.items())] for needs in ranks]]
            for node, role in self.roles.items()
            for ranks in (self.needs[node],)
        ]
        text = json.dumps([self.size, entries, sorted(self.summed), sorted(self.parts.items())])
        return hashlib.sha256(text.encode()).hexdigest()

    def lines(self) -> Iterator[str]:
        """Yield what the plan amounts to, in words."""
        yield (
            f"each of {self.size} ranks holds {self.held_bytes / 1e6:.1f} MB of "
            f"{sum(weight.nbytes for weight in self.weights) / 1e6:.1f} MB of weights, {self.whole_bytes / 1e6:.1f} MB "
            f"of which are whole; {len(self.summed)} values of a step are added up, "
            f"{sum(role is Role.GATHERED for role in self.roles.values())} gathered"
        )
        for weight in self.weights:
            if not weight.how:
                yield f"whole: {weight.name} ({weight.nbytes / 1e6:.2f} MB): {weight.why}"

"""A rank's own graph: what the plan says it computes, with the exchanges of results as operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inferencex.formats.dtypes import DataType
from inferencex.formats.graph import Graph, Node, Value
from inferencex.runtime.parallel.editing import GraphBuilder
from inferencex.runtime.parallel.fixed_values import FixedValues, take
from inferencex.runtime.parallel.graph_facts import GraphFacts
from inferencex.runtime.parallel.names import ALL_GATHER, ALL_REDUCE, PARALLEL_DOMAIN
from inferencex.runtime.parallel.parts import Part, Ranges, Shape, count, shape_of, whole
from inferencex.runtime.parallel.roles import Plan, Role
from inferencex.runtime.parallel.rules import Needs
from inferencex.runtime.parallel.rules.contract import unchanged
from inferencex.runtime.parallel.tensors import TensorCut


@dataclass(frozen=True, eq=False)
class Shard:
    """What one rank runs.

    graph:   with the operators of domain `PARALLEL_DOMAIN`; its stored initializers are those of `tensors`
    tensors: by name, what each is a part of
    plan_digest: what all ranks agree about
    """

    rank: int
    graph: Graph
    tensors: dict[str, TensorCut]
    plan_digest: str

    @property
    def nbytes(self) -> int:
        """Bytes of stored tensors that the rank holds."""
        return sum(cut.nbytes for cut in self.tensors.values())


def cut_graph(plan: Plan, rank: int) -> Shard:
    """Return the graph of one rank."""
    return _Cutter(plan, rank).run()


class _Cutter:
    """Goes through the whole graph and makes the rank's, node by node.

    made:   by name, what the rank has of a value of the whole graph, and which part that is
    taken:  parts of what the rank has of a value
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan, self._rank = plan, rank
        self._facts = GraphFacts(plan.graph)
        self._builder = GraphBuilder()
        self._made: dict[str, tuple[Value, Part]] = {}
        self._fixed = FixedValues(self._builder, self._facts)
        self._taken: dict[tuple[str, Part], Value] = {}

    def run(self) -> Shard:
        graph = self._plan.graph
        inputs = []
        for value in graph.inputs:
            made = self._builder.input(value)
            inputs.append(made)
            self._made[value.name] = (made, whole(len(value.shape or ())))
        for node in self._needed():
            self._node(node)
        outputs = [self._read(value, whole(len(self._facts.shape(value) or ()))) for value in graph.outputs]
        built = self._builder.graph(graph, inputs, outputs, {PARALLEL_DOMAIN: 1})
        return Shard(self._rank, built, self._fixed.tensors, self._plan.digest())

    def _needed(self) -> list[Node]:
        """Return the nodes that the rank has to execute, in order."""
        read = {value.name for value in self._plan.graph.outputs}
        needed: list[Node] = []
        for node in reversed(self._plan.graph.nodes):
            if self._facts.is_static_node(node) or not any(value.name in read for value in node.outputs):
                continue
            needed.append(node)
            if not self._facts.is_known_shape(node):
                needs = self._needs(node)
                for value, part in zip(node.inputs, needs.inputs, strict=True):
                    if value is not None and part is not None:
                        read.add(value.name)
        return needed[::-1]

    def _needs(self, node: Node) -> Needs:
        of_ranks = self._plan.needs.get(node)
        return Needs(tuple(unchanged(node, self._facts))) if of_ranks is None else of_ranks[self._rank]

    def _node(self, node: Node) -> None:
        if self._facts.is_known_shape(node):
            self._shape(node)
            return
        needs, role = self._needs(node), self._plan.roles.get(node)
        if role is Role.PART and needs.selects is not None:
            self._select(node, needs.selects)
            return
        inputs: list[Value | None] = []
        for place, (value, part) in enumerate(zip(node.inputs, needs.inputs, strict=True)):
            if place in needs.constants:
                inputs.append(self._builder.constant(needs.constants[place]))
            elif value is None or part is None:
                inputs.append(None)
            else:
                inputs.append(self._read(value, part))
        if node.op_type == "Concat":
            inputs = [value for value in inputs if value is not None]
        if role is Role.SUM_BY_EXPERT:
            inputs[1:3] = self._own_experts(node, needs, inputs[1], inputs[2])
        if role is Role.SUM_BY_ROW:
            self._rows_of_table(node, needs, inputs)
            return
        outputs = [self._output(node, place, role) for place in range(len(node.outputs))]
        made = self._builder.copy(node, inputs, outputs, needs.attributes)
        for value, result in zip(node.outputs, made, strict=True):
            self._finish(value, result, role)

    def _output(self, node: Node, place: int, role: Role | None) -> tuple[str, DataType | None, Shape | None]:
        value = node.outputs[place]
        shape = self._facts.shape(value)
        part = self._part(value)
        if role is Role.GATHERED:
            part = self._gathered_part(value)
        name = f"{value.name}.part" if role is Role.GATHERED or value.name in self._plan.summed else value.name
        return name, value.dtype, None if shape is None or part is None else shape_of(shape, part)

    def _part(self, value: Value) -> Part:
        of_ranks = self._plan.parts.get(value.name)
        return whole(len(self._facts.shape(value) or ())) if of_ranks is None else of_ranks[self._rank]

    def _gathered_part(self, value: Value) -> Part:
        shape = self._facts.shape(value) or ()
        return (*(None,) * (len(shape) - 1), self._columns(value)[self._rank])

    def _columns(self, value: Value) -> list[Ranges]:
        """Return the columns of a gathered value that each rank computes."""
        node = value.producer()
        assert node is not None
        axis = 0 if node.op_type == "Gemm" and node.attributes.get_int("transB", 0) else 1
        weights = [needs.inputs[1] for needs in self._plan.needs[node]]
        return [weight[axis] or () for weight in weights if weight is not None]

    def _finish(self, value: Value, result: Value, role: Role | None) -> None:
        """Exchange results where the plan says so, and remember what the rank has of a value."""
        shape = self._facts.shape(value)
        if role is Role.GATHERED:
            sizes = [count(columns) for columns in self._columns(value)]
            (result,) = self._builder.add(
                ALL_GATHER, [result], [(value.name, value.dtype, shape)], {"sizes": sizes}, PARALLEL_DOMAIN
            )
        elif value.name in self._plan.summed:
            (result,) = self._builder.add(ALL_REDUCE, [result], [(value.name, value.dtype, shape)], {}, PARALLEL_DOMAIN)
        self._made[value.name] = (result, self._part(value))

    def _select(self, node: Node, selects: Sequence[Part | None]) -> None:
        """Have the outputs of a node be parts of its input."""
        source = node.inputs[0]
        assert source is not None
        for value, part in zip(node.outputs, selects, strict=True):
            if part is not None and () not in part:
                self._made[value.name] = (self._read(source, part), self._part(value))

    def _shape(self, node: Node) -> None:
        """Put a shape of the whole graph together from the sizes of a step."""
        source = node.inputs[0]
        shape = None if source is None else self._facts.shape(source)
        assert shape is not None, "the shape is known"
        start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", len(shape))
        pieces = []
        for size in shape[start:end]:
            if isinstance(size, int):
                pieces.append(self._builder.constant(np.array([size], dtype=np.int64)))
            else:
                counted = self._made[self._facts.symbols[size].name][0]
                pieces += self._builder.add("Shape", [counted], [("size", DataType.INT64, (1,))], {"start": 0})
        output = node.outputs[0]
        named = (output.name, output.dtype, (len(pieces),))
        (made,) = self._builder.add("Concat", pieces, [named], {"axis": 0})
        self._made[output.name] = (made, whole(1))

    def _read(self, value: Value, part: Part) -> Value:
        """Return a part of a value."""
        if self._facts.is_static(value):
            return self._fixed.read(value, part)
        made, have = self._made[value.name]
        if have == part:
            return made
        key = (value.name, part)
        if key not in self._taken:
            self._taken[key] = take(self._builder, made, self._facts.shape(value) or (), have, part)
        return self._taken[key]

    def _own_experts(self, node: Node, needs: Needs, chosen: Value | None, factors: Value | None) -> list[Value | None]:
        """Return which of its own experts the rank applies, and with what factors: 0 for those of others."""
        weights = needs.inputs[3]
        assert chosen is not None and factors is not None and weights is not None and weights[0] is not None
        ((first, last),) = weights[0]
        name = node.outputs[0].name
        local, own = self._shifted_ids(chosen, first, last - first, name)
        zero = self._builder.constant(np.zeros((), dtype=np.float32))
        typed = (f"{name}.factors", factors.dtype, factors.shape)
        (masked,) = self._builder.add("Where", [own, factors, zero], [typed])
        return [local, masked]

    def _shifted_ids(self, ids: Value, first: int, size: int, name: str) -> tuple[Value, Value]:
        """Return ids counted from `first` on, 0 for those that are not among `size` of them, and which of them are."""
        dtype = np.int32 if ids.dtype is DataType.INT32 else np.int64
        build, shape = self._builder, ids.shape

        def number(content: int) -> Value:
            return build.constant(np.array(content, dtype=dtype))

        (moved,) = build.add("Sub", [ids, number(first)], [(f"{name}.ids", ids.dtype, shape)])
        (not_before,) = build.add("GreaterOrEqual", [moved, number(0)], [(f"{name}.not_before", DataType.BOOL, shape)])
        (not_behind,) = build.add("Less", [moved, number(size)], [(f"{name}.not_behind", DataType.BOOL, shape)])
        (own,) = build.add("And", [not_before, not_behind], [(f"{name}.own", DataType.BOOL, shape)])
        (local,) = build.add("Where", [own, moved, number(0)], [(f"{name}.own_ids", ids.dtype, shape)])
        return local, own

    def _rows_of_table(self, node: Node, needs: Needs, inputs: Sequence[Value | None]) -> None:
        """Look up the rows that the rank has; those of others are zero here."""
        table, ids, rows = inputs[0], inputs[1], needs.inputs[0]
        assert table is not None and ids is not None and rows is not None and rows[0] is not None
        ((first, last),) = rows[0]
        value, shape = node.outputs[0], self._facts.shape(node.outputs[0])
        local, own = self._shifted_ids(ids, first, last - first, value.name)
        (found,) = self._builder.copy(node, [table, local], [(f"{value.name}.found", value.dtype, shape)], {})
        axes = self._builder.constant(np.array([1], dtype=np.int64))
        column = (f"{value.name}.own_rows", DataType.BOOL, (*(own.shape or ()), 1))
        (by_row,) = self._builder.add("Unsqueeze", [own, axes], [column])
        zero = self._builder.constant(np.zeros((), dtype=np.float32))
        (result,) = self._builder.add("Where", [by_row, found, zero], [self._output(node, 0, Role.SUM_BY_ROW)])
        self._finish(value, result, Role.SUM_BY_ROW)

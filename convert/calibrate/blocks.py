"""Cut a graph into blocks that are executed one after the other, over all samples, with little kept between them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import onnx_ir as ir

from inferencex.convert.calibrate.sharing import SharedInput
from inferencex.convert.passes.editing import is_weight
from inferencex.formats.dialect.schemas import DOMAIN


@dataclass(frozen=True)
class Stage:
    """Consecutive nodes of a block, which compute what the next linears read.

    inputs:   names of the values it reads that earlier stages or the graph's inputs provide
    outputs:  names of the values that later nodes, or the graph's outputs, need once it has run; values that pass it
              by are among them
    weights:  names of the initializers it reads that hold parameters
    shared:   the inputs of quantized linears that are there once it has run, and are read by the nodes right after it;
              the inner value of experts counts with the input of the experts
    """

    nodes: tuple[ir.Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[str, ...]
    shared: tuple[SharedInput, ...] = ()


@dataclass(frozen=True)
class Block:
    """Stages that are calibrated, and kept when they are finished, together: a layer of the model."""

    index: int
    stages: tuple[Stage, ...]

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        """All nodes, in order."""
        return tuple(node for stage in self.stages for node in stage.nodes)

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the weights that any stage reads."""
        return tuple(dict.fromkeys(name for stage in self.stages for name in stage.weights))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the values that later blocks need."""
        return self.stages[-1].outputs


def static_nodes(graph: ir.Graph) -> list[ir.Node]:
    """List the nodes that read neither the step nor parameters: tables and shapes, the same in every step."""
    moving = {str(value.name) for value in graph.inputs}
    still: list[ir.Node] = []
    for node in graph:
        if any(v is not None and (str(v.name) in moving or is_weight(v)) for v in node.inputs):
            moving.update(str(output.name) for output in node.outputs)
        else:
            still.append(node)
    return still


def cut_blocks(graph: ir.Graph, shared: Sequence[SharedInput]) -> list[Block]:
    """Cut between one attention and the next, and after the last, where the fewest numbers have to be kept.

    An input that linears share, what absorbs its factors and all its readers stay in one block. Where no such place
    lies between two attentions, both are in one block.
    """
    nodes = _quantized_last(graph, shared)
    place = {node: index for index, node in enumerate(nodes)}
    held = _held_together(graph, place, shared)
    widths = _live_widths(graph, nodes)
    attentions = [i for i, n in enumerate(nodes) if n.domain == DOMAIN and n.op_type == "Attention"]
    cuts = [0]
    for first, last in zip(attentions, [*attentions[1:], len(nodes) - 1], strict=False):
        allowed = [p for p in range(first + 1, last + 1) if not any(low < p <= high for low, high in held)]
        if allowed:
            cuts.append(min(allowed, key=lambda p: (widths[p], -p)))
    bounds = list(dict.fromkeys([*cuts, len(nodes)]))
    before = _first_readers(graph, place, shared)
    blocks = []
    for index, (start, stop) in enumerate(pairwise(bounds)):
        stops = sorted({p for p in before if start <= p < stop} | {stop})
        stages = []
        for low, high in zip([start, *stops], stops, strict=False):
            read_next = tuple(before.get(high, ())) if high < stop else ()
            stages.append(make_stage(graph, nodes, low, high, read_next))
        blocks.append(Block(index, tuple(stages)))
    return blocks


def _quantized_last(graph: ir.Graph, shared: Sequence[SharedInput]) -> list[ir.Node]:
    """Order the nodes that are not static so that everything else that can run does so before a quantized linear.

    The choice of experts is then known before any linear that reads what the experts read is quantized.
    """
    still = set(static_nodes(graph))
    waiting = [node for node in graph if node not in still]
    delayed = {use.node for one in shared for name in one.quantized for use in graph.initializers[name].uses()}
    inputs_left = {
        node: {p for v in node.inputs if v is not None and (p := v.producer()) is not None and p not in still}
        for node in waiting
    }
    users: dict[ir.Node, list[ir.Node]] = {}
    for node, sources in inputs_left.items():
        for source in sources:
            users.setdefault(source, []).append(node)
    original = {node: index for index, node in enumerate(waiting)}
    ready = [(node in delayed, original[node]) for node in waiting if not inputs_left[node]]
    heapq.heapify(ready)
    ordered = []
    while ready:
        node = waiting[heapq.heappop(ready)[1]]
        ordered.append(node)
        for user in users.get(node, ()):
            inputs_left[user].discard(node)
            if not inputs_left[user]:
                heapq.heappush(ready, (user in delayed, original[user]))
    return ordered


def _first_readers(
    graph: ir.Graph, place: dict[ir.Node, int], shared: Sequence[SharedInput]
) -> dict[int, list[SharedInput]]:
    """Group shared inputs by the place of the first quantized linear that reads them."""
    found: dict[int, list[SharedInput]] = {}
    for one in shared:
        first = min(place[use.node] for name in one.quantized for use in graph.initializers[name].uses())
        found.setdefault(first, []).append(one)
    return found


def _held_together(graph: ir.Graph, place: dict[ir.Node, int], shared: Sequence[SharedInput]) -> list[tuple[int, int]]:
    """Return the first and last place of the nodes that a shared input ties together."""
    intervals = []
    for one in shared:
        tensors = [*one.readers, *(one.absorber.tensors if one.absorber else ())]
        places = [place[use.node] for name in tensors for use in graph.initializers[name].uses() if use.node in place]
        if places:
            intervals.append((min(places), max(places)))
    return intervals


def _live_widths(graph: ir.Graph, nodes: Sequence[ir.Node]) -> list[int]:
    """Return, for a cut before each node, how many numbers a token has to carry over it."""
    place = {node: index for index, node in enumerate(nodes)}
    changes = [0] * (len(nodes) + 2)
    for index, node in enumerate(nodes):
        for output in node.outputs:
            last = max((place[use.node] for use in output.uses() if use.node in place), default=index)
            width = math.prod(d for d in output.shape if isinstance(d, int)) if output.shape else 1
            changes[index + 1] += width
            changes[last + 1] -= width
    widths, live = [], 0
    for change in changes[: len(nodes) + 1]:
        live += change
        widths.append(live)
    return widths


def make_stage(
    graph: ir.Graph, nodes: Sequence[ir.Node], start: int, stop: int, shared: tuple[SharedInput, ...] = ()
) -> Stage:
    """Make a stage of `nodes[start:stop]`, all the nodes of a graph that are not static in an order they can run."""
    moving = {str(v.name) for v in graph.inputs} | {str(o.name) for node in nodes for o in node.outputs}
    before = {str(v.name) for v in graph.inputs} | {str(o.name) for node in nodes[:start] for o in node.outputs}
    made = {str(o.name) for node in nodes[start:stop] for o in node.outputs}
    reads = [v for node in nodes[start:stop] for v in node.inputs if v is not None]
    wanted = {str(v.name) for node in nodes[stop:] for v in node.inputs if v is not None}
    wanted |= {str(v.name) for v in graph.outputs}
    return Stage(
        tuple(nodes[start:stop]),
        tuple(dict.fromkeys(str(v.name) for v in reads if str(v.name) in moving - made)),
        tuple(sorted((made | before) & wanted)),
        tuple(dict.fromkeys(str(v.name) for v in reads if is_weight(v))),
        shared,
    )

"""Checking that every value a graph uses is made by something in it."""

from __future__ import annotations

from collections.abc import Iterable

from inferencex.formats import onnx_messages as onnx
from inferencex.formats.bundle.layout import GRAPH_FILE
from inferencex.formats.errors import BundleError

_MAX_DEPTH = 16


def check_dataflow(model: onnx.ModelProto) -> None:
    """Check that each input of a node is a graph input, an initializer or an earlier node's output.

    Raises BundleError naming the node, or the output of the graph, that uses a value nobody makes.
    """
    _check(model.graph, frozenset(), 0)


def _check(graph: onnx.GraphProto, outer: Iterable[str], depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise BundleError(f"{GRAPH_FILE}: graphs nested more than {_MAX_DEPTH} deep")
    known = {"", *outer}
    known.update(value.name for value in graph.input)
    known.update(tensor.name for tensor in graph.initializer)
    for node in graph.node:
        for name in node.input:
            if name not in known:
                label = node.name or (node.output[0] if node.output else "")
                raise BundleError(
                    f"{GRAPH_FILE}: node {label[:80]!r} ({node.op_type[:40]}) uses {name[:80]!r}, "
                    "which is neither an input, nor an initializer, nor made by an earlier node"
                )
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _check(attribute.g, known, depth + 1)
            for inner in attribute.graphs:
                _check(inner, known, depth + 1)
        known.update(node.output)
    for output in graph.output:
        if output.name not in known:
            raise BundleError(f"{GRAPH_FILE}: the graph's output {output.name[:80]!r} is made by no node")

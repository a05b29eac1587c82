"""Whether nodes have the operands and attributes that their operators are defined with; lowering relies on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from inferencex.formats.errors import BackendError
from inferencex.formats.graph import Graph, Node
from inferencex.formats.onnx_messages import AttributeProto
from inferencex.runtime.backends.graph.signatures import Signature, signature_of

_CONTRADICTIONS = (ArithmeticError, AssertionError, LookupError, MemoryError, TypeError, ValueError)
_WITH_GRAPHS = (AttributeProto.GRAPH, AttributeProto.GRAPHS)


def label_of(node: Node) -> str:
    """Return how messages name a node: its operator, and its name or first output."""
    name = node.name or next((value.name for value in node.outputs if value.name), "without a name")
    return f"{node.domain or 'ai.onnx'}::{node.op_type} {name[:80]!r}"


def check_nodes(graph: Graph) -> None:
    """Raise BackendError, naming the node and what is wrong with it, for one that its operator does not allow.

    What ONNX does not know is left to those who lower it; graphs inside of nodes are no part of the IR dialect.
    """
    for node in graph:
        if any(attribute.type in _WITH_GRAPHS for attribute in node.proto.attribute):
            raise BackendError(f"{label_of(node)} holds a graph; backends run graphs without any inside")
        signature = signature_of(node.domain, node.op_type)
        if signature is not None:
            _check_operands(node, signature)
            _check_attributes(node, signature)


def _check_operands(node: Node, signature: Signature) -> None:
    for what, values, (fewest, most) in (
        ("inputs", node.inputs, signature.inputs),
        ("outputs", node.outputs, signature.outputs),
    ):
        if not fewest <= len(values) <= most:
            limits = str(fewest) if fewest == most else f"{fewest} to {most}"
            raise BackendError(f"{label_of(node)} has {len(values)} {what}, expected {limits}")
    for place, value in enumerate(node.inputs):
        if value is None and signature.is_required[min(place, len(signature.is_required) - 1)]:
            raise BackendError(f"{label_of(node)} lacks its input {place}, which may not be left out")


def _check_attributes(node: Node, signature: Signature) -> None:
    missing = signature.needed.difference(node.attributes)
    if missing:
        raise BackendError(f"{label_of(node)} lacks the attribute {min(missing)}")
    for attribute in node.proto.attribute:
        expected = signature.attributes.get(attribute.name)
        if expected is not None and attribute.type != expected:
            found, wanted = (AttributeProto.AttributeType.Name(kind) for kind in (attribute.type, expected))
            raise BackendError(f"{label_of(node)}: the attribute {attribute.name} is {found}, expected {wanted}")


@contextmanager
def naming(node: Node) -> Iterator[None]:
    """Make complaints about a node, of operands that do not go together above all, a BackendError that names it."""
    try:
        yield
    except BackendError as error:
        if any(repr(value.name) in str(error) for value in node.outputs) or label_of(node) in str(error):
            raise
        raise BackendError(f"{label_of(node)}: {error}") from error
    except _CONTRADICTIONS as error:
        raise BackendError(
            f"{label_of(node)} has operands or attributes that contradict each other: {error or type(error).__name__}"
        ) from error

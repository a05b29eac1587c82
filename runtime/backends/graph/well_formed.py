"""Whether nodes have the operands and attributes that their operators are defined with; lowering relies on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    well_formed: set[Any] = set()  # a graph has few kinds of nodes, many times
    for node in graph:
        form = (
            node.domain,
            node.op_type,
            tuple([value is None for value in node.inputs]),
            len(node.outputs),
            tuple([(attribute.name, attribute.type) for attribute in node.proto.attribute]),
        )
        if form in well_formed:
            continue
        well_formed.add(form)
        signature = signature_of(node.domain, node.op_type)
        if signature is not None:
            _check_operands(node, signature)
            missing = signature.needed.difference(node.attributes)
            if missing:
                raise BackendError(f"{label_of(node)} lacks the attribute {min(missing)}")
        _check_attributes(node, {} if signature is None else signature.attributes)


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


def _check_attributes(node: Node, types: Mapping[str, int]) -> None:
    for attribute in node.proto.attribute:
        kind = attribute.type
        if kind in _WITH_GRAPHS:
            raise BackendError(f"{label_of(node)} holds a graph; backends run graphs without any inside")
        expected = types.get(attribute.name)
        if expected is not None and kind != expected:
            found, wanted = (AttributeProto.AttributeType.Name(number) for number in (kind, expected))
            raise BackendError(f"{label_of(node)}: the attribute {attribute.name} is {found}, expected {wanted}")


class naming:  # like a function; one of contextlib takes three times as long, and there are two for each node
    """Make complaints about a node, of operands that do not go together above all, a BackendError that names it."""

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        self._node = node

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None or not isinstance(error, (BackendError, *_CONTRADICTIONS)):
            return
        node = self._node
        if not isinstance(error, BackendError):
            raise BackendError(
                f"{label_of(node)} has operands or attributes that contradict each other: "
                f"{error or type(error).__name__}"
            ) from error
        if not any(repr(value.name) in str(error) for value in node.outputs) and label_of(node) not in str(error):
            raise BackendError(f"{label_of(node)}: {error}") from error

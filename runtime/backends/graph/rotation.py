"""Where queries and keys are rotated right in front of attention, which can then do so itself."""

from __future__ import annotations

from inferencex.formats.graph import Graph, Node, Value
from inferencex.formats.records import record
from inferencex.runtime.backends.graph.static_values import StaticValues

_RESHAPES = ("Reshape", "Squeeze", "Unsqueeze", "Identity")


@record(frozen=True)
class Rotation:
    """A RotaryEmbedding in front of attention: what it rotates, and with what."""

    node: Node
    source: Value
    path: tuple[Node, ...]  # the nodes between source and attention, itself included


def rotation_in_front(graph: Graph, static: StaticValues, value: Value | None, heads: int) -> Rotation | None:
    """Return the rotation that produced a value for attention alone, or None."""
    path: list[Node] = []
    while value is not None:
        node = value.producer()
        if node is None or len(value.consumers()) != 1 or any(value is out for out in graph.outputs):
            return None
        path.append(node)
        if node.op_type == "RotaryEmbedding":
            positions = node.inputs[3] if len(node.inputs) > 3 else None
            if positions is None or node.inputs[0] is None or node.attributes.get_int("num_heads", 0) != heads:
                return None
            if any(node.inputs[i] not in static for i in (1, 2)):
                return None
            return Rotation(node, node.inputs[0], tuple(path))
        if node.op_type not in _RESHAPES or node.domain != "":
            return None
        value = node.inputs[0]
    return None

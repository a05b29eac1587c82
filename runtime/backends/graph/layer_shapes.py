"""What the attention layers of a graph keep: heads, widths and calibrated scales, by layer."""

from __future__ import annotations

from inferencex.formats.dialect.names import DOMAIN
from inferencex.formats.errors import BackendError
from inferencex.formats.graph import Graph, Value
from inferencex.formats.kv_cache import KVScales, kv_scales_by_layer
from inferencex.formats.records import record


@record(frozen=True)
class LayerShape:
    """What one token of a layer keeps: `num_kv_heads` keys of `key_width` and values of `value_width` numbers."""

    num_kv_heads: int
    key_width: int
    value_width: int


def layer_shapes(graph: Graph) -> dict[int, LayerShape]:
    """Return the layer state that the attention of a graph keeps, by layer. Raises BackendError for unknown sizes."""
    shapes: dict[int, LayerShape] = {}
    for node in graph:
        if node.domain != DOMAIN or node.op_type != "Attention":
            continue
        heads = node.attributes.get_int("num_kv_heads")
        widths = [_width(node.inputs[place] if place < len(node.inputs) else None) for place in (1, 2)]
        if heads < 1 or any(width % heads for width in widths):
            raise BackendError(f"attention {node.outputs[0].name!r} has {heads} key-value heads for widths {widths}")
        shape = LayerShape(heads, widths[0] // heads, widths[1] // heads)
        if shapes.setdefault(node.attributes.get_int("layer"), shape) != shape:
            raise BackendError(f"attention {node.outputs[0].name!r} shares a layer with one of another shape")
    return shapes


def _width(value: Value | None) -> int:
    width = value.shape[-1] if value is not None and value.shape else None
    if not isinstance(width, int):
        raise BackendError(f"value {value and value.name!r} has no fixed number of features")
    return width


def kv_scales_of(graph: Graph) -> dict[int, KVScales]:
    """Return the calibrated scales of keys and values, by layer. Raises BundleError when they make no sense."""
    nodes = [node for node in graph if node.domain == DOMAIN and node.op_type == "Attention"]
    return kv_scales_by_layer((n.attributes.get_int("layer"), n.attributes, n.outputs[0].name) for n in nodes)

"""Turn mask inputs of attention into attributes, and number the layers.

After capture an attention node reads a mask value. If that is an opaque causal mask, untouched or sliced to its own
size, its window and chunk become attributes. Nodes whose keys and values are the same values share a layer's state.
"""

from __future__ import annotations

import onnx_ir as ir

from inferencex.convert.capture.routes import UNKNOWN_MASK
from inferencex.convert.capture.translations import CAPTURE_DOMAIN
from inferencex.convert.passes.editing import Editor, attribute, drop_dead
from inferencex.formats.dialect.schemas import DOMAIN, VERSION
from inferencex.formats.errors import CaptureError

_TRANSPARENT = {"Identity", "Cast", "Slice", "Expand", "Unsqueeze", "Squeeze", "Reshape"}


def mask_of(value: ir.Value | None) -> ir.Node | None:
    """Return the opaque mask node that `value` is, seen through operators that leave all of it in place."""
    while value is not None:
        node = value.producer()
        if node is None:
            return None
        if node.domain == CAPTURE_DOMAIN and node.op_type == "CausalMask":
            return node
        if node.op_type not in _TRANSPARENT:
            return None
        source = node.inputs[0]
        if node.op_type == "Slice" and source is not None and str(source.shape) != str(value.shape):
            return None
        value = source
    return None


def absorb_masks(model: ir.Model) -> int:
    """Replace the attention nodes of capture by those of the dialect, and number the layers; returns how many."""
    graph = model.graph
    edit = Editor(graph)
    layers: dict[tuple[int, int], int] = {}
    count = 0
    for node in list(graph):
        if node.op_type != "Attention" or node.domain not in (CAPTURE_DOMAIN, DOMAIN):
            continue
        q, k, v, *rest = node.inputs
        attributes = {n: attribute(node, n) for n in ("num_heads", "num_kv_heads", "scale", "softcap")}
        if node.domain == CAPTURE_DOMAIN:
            (mask, sinks), slopes = (*rest, None, None)[:2], None
            attributes["window"], attributes["chunk"] = _window_and_chunk(node, mask)
        else:
            sinks, slopes = (*rest, None, None)[:2]
            attributes["window"], attributes["chunk"] = attribute(node, "window"), attribute(node, "chunk")
        key = (id(k), id(v))
        attributes["writes"] = int(key not in layers)
        attributes["layer"] = layers.setdefault(key, len(layers))
        output = node.outputs[0]
        new = edit.node(
            "Attention", [q, k, v, sinks, slopes], attributes, domain=DOMAIN, shape=output.shape, stem="attention"
        )
        edit.substitute(output, edit.before(node, new))
        count += 1
    drop_dead(graph)
    if any(node.domain == CAPTURE_DOMAIN for node in graph):
        raise CaptureError(
            "a mask is used outside of attention: this model computes attention in a way that was not recognized"
        )
    if not count:
        raise CaptureError("no attention layer was found")
    model.opset_imports.pop(CAPTURE_DOMAIN, None)
    model.opset_imports[DOMAIN] = VERSION
    return count


def _window_and_chunk(node: ir.Node, mask: ir.Value | None) -> tuple[int, int]:
    """Read the mask of a captured attention node."""
    if mask is None:
        return int(attribute(node, "window", 0)), 0
    found = mask_of(mask)
    if found is None:
        raise CaptureError(
            f"attention {node.outputs[0].name} uses a mask that is changed by {mask.producer()}; only causal masks "
            "with a window or chunk are supported"
        )
    window, chunk = int(attribute(found, "window")), int(attribute(found, "chunk"))
    if (window, chunk) == UNKNOWN_MASK:
        raise CaptureError("a layer's attention mask is not causal with at most one window or chunk")
    return window, chunk

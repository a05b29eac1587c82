"""Turn mask inputs of attention into attributes, and number the layers.

After capture an attention node reads a mask value. If that is an opaque causal mask, untouched or sliced to its own
size, its window and chunk become attributes. Nodes whose keys and values are the same values share a layer's state.
"""

from __future__ import annotations

import onnx_ir as ir

from inferencex.convert.capture.translations import CAPTURE_DOMAIN
from inferencex.convert.passes.editing import Editor, attribute, drop_dead
from inferencex.formats.dialect.schemas import DOMAIN
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
    """Replace the attention nodes of capture by those of the dialect; returns how many."""
    graph = model.graph
    edit = Editor(graph)
    layers: dict[tuple[int, int], int] = {}
    count = 0
    for node in list(graph):
        if node.domain != CAPTURE_DOMAIN or node.op_type != "Attention":
            continue
        q, k, v = node.inputs[:3]
        mask = node.inputs[3] if len(node.inputs) > 3 else None
        sinks = node.inputs[4] if len(node.inputs) > 4 else None
        window, chunk = int(attribute(node, "window", 0)), 0
        if mask is not None:
            found = mask_of(mask)
            if found is None:
                raise CaptureError(
                    f"attention {node.outputs[0].name} uses a mask that is changed by {mask.producer()}; only causal masks "
                    "with a window or chunk are supported"
                )
            window, chunk = int(attribute(found, "window")), int(attribute(found, "chunk"))
        key = (id(k), id(v))
        writes = key not in layers
        layer = layers.setdefault(key, len(layers))
        attributes = {
            "layer": layer,
            "writes": int(writes),
            "num_heads": attribute(node, "num_heads"),
            "num_kv_heads": attribute(node, "num_kv_heads"),
            "scale": attribute(node, "scale"),
            "window": window,
            "chunk": chunk,
            "softcap": attribute(node, "softcap"),
        }
        output = node.outputs[0]
        new = edit.node("Attention", [q, k, v, sinks], attributes, domain=DOMAIN, shape=output.shape, stem="attention")
        edit.substitute(output, edit.before(node, new))
        count += 1
    drop_dead(graph)
    if any(node.domain == CAPTURE_DOMAIN and node.op_type == "CausalMask" for node in graph):
        raise CaptureError("a mask is used outside of attention: attention computed in-line is not supported here")
    model.opset_imports.pop(CAPTURE_DOMAIN, None)
    model.opset_imports[DOMAIN] = 1
    return count

"""A calibrated KV cache: its scales in the graph, and what it costs, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from inferencex.formats.dialect.schemas import DOMAIN
from inferencex.formats.kv_cache import KV_FORMATS, KVFormat


@dataclass(frozen=True)
class KVLayerReport:
    """The keys and values of one layer over all calibration samples.

    layer:                  as the graph numbers it
    format:                 `int8` or `fp8`
    heads:                  KV heads; each has a scale for keys and one for values
    tokens:                 calibration tokens
    keys_error:             norm of (keys - keys as they are kept) over norm of keys
    values_error:           the same of values
    keys_error_absmax, values_error_absmax:  the same if each scale covered the largest magnitude observed
    """

    layer: int
    format: str
    heads: int
    tokens: int
    keys_error: float
    values_error: float
    keys_error_absmax: float
    values_error_absmax: float


def store_scales(graph: ir.Graph, kind: KVFormat, scales: Mapping[int, NDArray[np.float32]]) -> None:
    """Give every `Attention` node of a graph the scales of its layer, `[2, G]`, of keys and of values.

    Nodes that only read what another one writes have that one's.
    """
    for node in graph:
        if node.domain == DOMAIN and node.op_type == "Attention":
            keys, values = scales[int(node.attributes["layer"].value)].tolist()
            node.attributes.add(ir.AttrInt64("kv_type", int(KV_FORMATS[kind])))
            node.attributes.add(ir.AttrFloat32s("key_scales", keys))
            node.attributes.add(ir.AttrFloat32s("value_scales", values))


def kv_cache_json(layers: Sequence[KVLayerReport]) -> dict[str, Any] | None:
    """Return what `report.json` says; None without calibrated scales."""
    return {"format": layers[0].format, "layers": [asdict(layer) for layer in layers]} if layers else None


def kv_cache_table(layers: Sequence[KVLayerReport]) -> list[str]:
    """Return what `report.md` says."""
    heads = sum(layer.heads for layer in layers)
    lines = [
        f"Keys and values in {layers[0].format}, with a calibrated scale for the keys and one for the values of each "
        f"of {heads} KV heads in {len(layers)} layers. Errors are relative; in parentheses what scales would give that "
        "cover the largest magnitude.",
        "",
        "| layer | keys | values |",
        "|---|---|---|",
    ]
    lines += [
        f"| {layer.layer} | {_errors(layer.keys_error, layer.keys_error_absmax)} "
        f"| {_errors(layer.values_error, layer.values_error_absmax)} |"
        for layer in layers
    ]
    return lines


def _errors(chosen: float, absmax: float) -> str:
    return f"{100 * chosen:.2f} % ({100 * absmax:.2f} %)"

"""Keys and values in 8 bits with calibrated scales: what the attributes of `Attention` say, checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

from inferencex.formats.dtypes import DataType
from inferencex.formats.errors import BundleError
from inferencex.formats.records import record

KVFormat = Literal["int8", "fp8"]
"""INT8, symmetric; or FP8 E4M3."""

KV_FORMATS: Final[dict[KVFormat, DataType]] = {"int8": DataType.INT8, "fp8": DataType.FLOAT8E4M3FN}
"""The attribute `kv_type` of each format."""

KV_LARGEST: Final[dict[KVFormat, float]] = {"int8": 127.0, "fp8": 448.0}
"""The magnitude that is kept of whatever is larger, in units of the scale."""


@record(frozen=True)
class KVScales:
    """What the keys and values of a layer are divided by before they are rounded: a number for each KV head."""

    format: KVFormat
    keys: tuple[float, ...]
    values: tuple[float, ...]


def kv_scales(attributes: Mapping[str, Any], where: str) -> KVScales | None:
    """Read the scales off the attributes of an `Attention` node called `where`; None when it has none.

    Raises BundleError for attributes that contradict each other, and for scales that are not positive and finite.
    """
    kind = attributes.get("kv_type", 0)
    found = {name: attributes.get(name) or () for name in ("key_scales", "value_scales")}
    formats = {int(number): name for name, number in KV_FORMATS.items()}
    if kind == 0:
        given = [name for name, scales in found.items() if scales]
        if given:
            raise BundleError(f"attention {where!r} has {given[0]} and no kv_type that says what they are for")
        return None
    if kind not in formats:
        raise BundleError(f"attention {where!r}: kv_type is {kind}, expected {' or '.join(map(str, formats))}, or 0")
    heads = attributes["num_kv_heads"]
    for name, scales in found.items():
        if len(scales) != heads:
            raise BundleError(f"attention {where!r} has {len(scales)} {name} for {heads} key-value heads")
        if not all(math.isfinite(scale) and scale > 0 for scale in scales):
            raise BundleError(f"attention {where!r}: {name} are {list(scales)[:8]}, expected positive numbers")
    return KVScales(formats[kind], tuple(found["key_scales"]), tuple(found["value_scales"]))


def kv_scales_by_layer(nodes: Iterable[tuple[int, Mapping[str, Any], str]]) -> dict[int, KVScales]:
    """Read the scales of every layer off the `Attention` nodes of a graph: layer, attributes and name of each.

    Empty when no node has any. Raises BundleError when nodes of a layer differ, when only some layers have scales, or
    scales for different formats.
    """
    layers: dict[int, KVScales | None] = {}
    for layer, attributes, where in nodes:
        scales = kv_scales(attributes, where)
        if layers.setdefault(layer, scales) != scales:
            raise BundleError(
                f"attention {where!r} has other scales for keys and values than what shares layer {layer}"
            )
    formats = {None if scales is None else scales.format for scales in layers.values()}
    if len(formats) > 1:
        names = ", ".join(sorted("none" if name is None else name for name in formats))
        raise BundleError(f"the layers of the graph keep keys and values in different formats: {names}")
    return {layer: scales for layer, scales in layers.items() if scales is not None}

"""Attention and rotary embedding: by whole heads."""

from __future__ import annotations

from collections.abc import Mapping

from inferencex.formats.dialect.names import DOMAIN
from inferencex.formats.graph import Node
from inferencex.runtime.parallel.parts import Ranges, count, from_indices, in_units, indices, scaled
from inferencex.runtime.parallel.rules.contract import (
    Facts,
    IndivisibleError,
    Needs,
    Parts,
    Rule,
    first,
    input_shape,
    output_shape,
    unchanged,
)


def _attention(node: Node, parts: Parts, facts: Facts) -> Needs | None:
    """Query heads with the key-value heads that they read.

    A rank's query heads have to divide evenly among its key-value heads, for that is all that the operator can say;
    key-value heads may be on several ranks.
    """
    part = first(parts)
    shapes = [input_shape(node, place, facts) for place in range(3)]
    result = output_shape(node, facts)
    heads, kv_heads = node.attributes.get_int("num_heads"), node.attributes.get_int("num_kv_heads")
    sizes = [None if shape is None else shape[-1] for shape in (*shapes, result)]
    if part[1] is None or not all(isinstance(size, int) for size in sizes):
        return None
    queries, keys, values, width = (int(size) for size in sizes if isinstance(size, int))
    own = in_units(part[1], width // heads, width)
    what = f"attention {node.outputs[0].name!r} has {heads} query heads and {kv_heads} key-value heads"
    if own is None or isinstance(own, str):
        raise IndivisibleError(what)
    shared = [int(head) * kv_heads // heads for head in indices(own)]
    own_kv = from_indices(sorted(set(shared)), kv_heads) or ((0, kv_heads),)
    places = {head: place for place, head in enumerate(sorted(set(shared)))}
    if any(place * len(places) // len(shared) != places[head] for place, head in enumerate(shared)):
        raise IndivisibleError(what)
    needed = unchanged(node, facts)
    needed[0] = (None, scaled(own, queries // heads))
    needed[1] = (None, _heads(own_kv, kv_heads, keys))
    needed[2] = (None, _heads(own_kv, kv_heads, values))
    for place in (3, 4):
        if place < len(needed) and needed[place] is not None:
            needed[place] = (own,)
    attributes: dict[str, object] = {"num_heads": count(own), "num_kv_heads": count(own_kv)}
    for name in ("key_scales", "value_scales"):
        scales = node.attributes.get(name)
        if scales:
            attributes[name] = [float(scales[int(head)]) for head in indices(own_kv)]
    return Needs(tuple(needed), attributes)


def _heads(ranges: Ranges, heads: int, features: int) -> Ranges | None:
    return None if ranges == ((0, heads),) else scaled(ranges, features // heads)


def kv_heads_of(needs: Needs) -> object:
    """Return what tells apart the key-value heads that nodes of one layer keep."""
    return needs.attributes.get("num_kv_heads"), needs.inputs[1], needs.inputs[2]


def _rotary(node: Node, parts: Parts, facts: Facts) -> Needs | None:
    part, shape = first(parts), output_shape(node, facts)
    needed = unchanged(node, facts)
    if shape is None:
        return None
    if len(shape) == 4:
        needed[0] = part
        return Needs(tuple(needed)) if part[2] is None and part[3] is None else None
    heads, width = node.attributes.get_int("num_heads", 0), shape[-1]
    if heads < 1 or not isinstance(width, int) or part[-1] is None:
        return None
    own = in_units(part[-1], width // heads, width)
    if own is None or isinstance(own, str):
        return None
    needed[0] = part
    return Needs(tuple(needed), {"num_heads": count(own)})


RULES: Mapping[tuple[str, str], Rule] = {
    ("", "RotaryEmbedding"): _rotary,
    (DOMAIN, "Attention"): _attention,
}

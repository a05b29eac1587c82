"""Quantized tensors: values with their scales and zero points, by whole groups."""

from __future__ import annotations

from collections.abc import Mapping

from inferencex.formats.dialect.names import DOMAIN
from inferencex.formats.graph import Node
from inferencex.runtime.parallel.parts import Part, count, in_units, whole
from inferencex.runtime.parallel.rules.contract import Facts, Needs, Parts, Rule, first, input_shape, output_shape


def group_along(node: Node, axis: int, rank: int) -> int:
    """Return how many neighbours along an axis share a scale of a DequantizeLinear; 1 where that is no question."""
    own = node.attributes.get_int("axis", 1) % rank
    return max(node.attributes.get_int("block_size", 0), 1) if own == axis else 1


def _scaled(node: Node, parts: Parts, facts: Facts) -> Needs | None:
    """QuantizeLinear and DequantizeLinear."""
    part, shape, scales = first(parts), output_shape(node, facts), input_shape(node, 1, facts)
    if shape is None or scales is None:
        return None
    axis = node.attributes.get_int("axis", 1) % max(len(shape), 1)
    block_size = node.attributes.get_int("block_size", 0)
    if block_size:
        size = shape[axis]
        groups = in_units(part[axis], block_size, size) if isinstance(size, int) else None
        if isinstance(groups, str):
            return None
        of_scales: Part = (*part[:axis], groups, *part[axis + 1 :])
    elif len(scales) == 1 and scales[0] != 1:
        of_scales = (part[axis],)
    else:
        of_scales = whole(len(scales))
    zero_points = () if len(node.inputs) < 3 else (None if node.inputs[2] is None else of_scales,)
    return Needs((part, of_scales, *zero_points))


def _quantize_rows(node: Node, parts: Parts, facts: Facts) -> Needs | None:
    """Every rank finds the scale of a row among the entries it has itself, which is at least as exact."""
    part = parts[0]
    return None if part is None else Needs((part,))


def _unpack_bits(node: Node, parts: Parts, facts: Facts) -> Needs | None:
    """The part of the input is said in the shape of the result; the input itself is a stream of bits."""
    part = first(parts)
    shape = node.attributes.get_ints("shape")
    sizes = [size if ranges is None else count(ranges) for size, ranges in zip(shape, part, strict=True)]
    return Needs((part,), {"shape": sizes})


RULES: Mapping[tuple[str, str], Rule] = {
    ("", "DequantizeLinear"): _scaled,
    ("", "QuantizeLinear"): _scaled,
    (DOMAIN, "QuantizeRows"): _quantize_rows,
    (DOMAIN, "UnpackBits"): _unpack_bits,
}

"""Products with fixed weights: by rows of the weight, and by columns, where what ranks compute has to be added up."""

from __future__ import annotations

from collections.abc import Mapping

from inferencex.formats.dialect.names import DOMAIN
from inferencex.formats.graph import Node
from inferencex.runtime.parallel.parts import Part, Ranges
from inferencex.runtime.parallel.rules.contract import (
    Facts,
    Needs,
    Parts,
    Rule,
    broadcast,
    first,
    input_shape,
    output_shape,
    unchanged,
)
from inferencex.runtime.parallel.rules.elementwise import gate_columns


def weight_place(node: Node, facts: Facts) -> int | None:
    """Return which input of a product is its fixed weight; None where the node is no product with one."""
    kind = (node.domain, node.op_type)
    if kind == ("", "Gemm"):
        plain = node.attributes.get_float("alpha", 1.0) == 1.0 and not node.attributes.get_int("transA", 0)
        return 1 if plain and facts.is_static(node.inputs[1]) and not facts.is_static(node.inputs[0]) else None
    if kind == ("", "MatMul"):
        weight = input_shape(node, 1, facts)
        is_linear = weight is not None and len(weight) == 2 and facts.is_static(node.inputs[1])
        return 1 if is_linear and not facts.is_static(node.inputs[0]) else None
    if kind == (DOMAIN, "ExpertLinear"):
        return 2 if facts.is_static(node.inputs[2]) else None
    return None


def features_axis(node: Node) -> int:
    """Return the axis of a product's weight that the inputs' columns run along."""
    if node.op_type == "ExpertLinear":
        return 2
    return 1 if node.op_type == "Gemm" and node.attributes.get_int("transB", 0) else 0


def row_parallel(node: Node, columns: Ranges, facts: Facts, *, has_bias: bool) -> Needs:
    """Return what a product needs of its inputs for these columns of the first one, whose results are then added up.

    has_bias: whether it adds the bias, which only one rank may do
    """
    needed = unchanged(node, facts)
    place = weight_place(node, facts)
    assert place is not None and needed[0] is not None and needed[place] is not None, "the node is a product"
    axis = features_axis(node)
    needed[0] = (*needed[0][:-1], columns)
    needed[place] = tuple(columns if i == axis else None for i in range(len(needed[place] or ())))
    behind = place + 1
    if not has_bias and behind < len(needed):
        needed[behind] = None
    return Needs(tuple(needed))


def experts_by_width(node: Node, columns: Ranges, width: int, facts: Facts, *, has_bias: bool) -> Needs:
    """Return what a layer of experts needs for these features between its two products, of which there are `width`."""
    needed = unchanged(node, facts)
    gates = gate_columns(node, columns, width)
    needed[3] = (None, gates, None)
    needed[4] = (None, None, columns)
    if len(needed) > 5 and needed[5] is not None:
        needed[5] = (None, gates)
    if len(needed) > 6 and not has_bias:
        needed[6] = None
    return Needs(tuple(needed))


def experts_by_expert(node: Node, experts: Ranges, facts: Facts) -> Needs:
    """Return what a layer of experts needs for these experts alone."""
    needed = unchanged(node, facts)
    for place in range(3, len(needed)):
        part = needed[place]
        if part is not None:
            needed[place] = (experts, *part[1:])
    return Needs(tuple(needed))


def _gemm(node: Node, parts: Parts, facts: Facts) -> Needs | None:
    part, shape = first(parts), output_shape(node, facts)
    if shape is None or part[0] is not None or node.attributes.get_int("transA", 0):
        return None
    needed = unchanged(node, facts)
    needed[1] = (part[1], None) if node.attributes.get_int("transB", 0) else (None, part[1])
    bias = input_shape(node, 2, facts)
    if len(needed) > 2 and needed[2] is not None:
        if bias is None:
            return None
        needed[2] = broadcast(part, shape, bias)
    return Needs(tuple(needed))


def _matmul(node: Node, parts: Parts, facts: Facts) -> Needs | None:
    part, shape = first(parts), output_shape(node, facts)
    left, right = input_shape(node, 0, facts), input_shape(node, 1, facts)
    if shape is None or left is None or right is None or len(left) < 2 or len(right) < 2:
        return None

    def operand(own: tuple[int | str | None, ...], rows: Ranges | None, columns: Ranges | None) -> Part:
        return (*broadcast(part[:-2], shape[:-2], own[:-2]), rows, columns)

    return Needs((operand(left, part[-2], None), operand(right, None, part[-1])))


def _expert_linear(node: Node, parts: Parts, facts: Facts) -> Needs | None:
    part = first(parts)
    if part[0] is not None:
        return None
    needed = unchanged(node, facts)
    needed[2] = (None, part[1], None)
    if len(needed) > 3 and needed[3] is not None:
        needed[3] = (None, part[1])
    return Needs(tuple(needed))


RULES: Mapping[tuple[str, str], Rule] = {
    ("", "Gemm"): _gemm,
    ("", "MatMul"): _matmul,
    (DOMAIN, "ExpertLinear"): _expert_linear,
}

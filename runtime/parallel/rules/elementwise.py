"""Operators that compute each entry from the same entries of their inputs, and those that look along an axis."""

from __future__ import annotations

from collections.abc import Mapping

from inferencex.formats.dialect.names import DOMAIN
from inferencex.formats.graph import Node
from inferencex.runtime.parallel.parts import Part, normalized
from inferencex.runtime.parallel.rules.contract import (
    Facts,
    Needs,
    Parts,
    Rule,
    broadcast,
    first,
    input_shape,
    only_whole,
    output_shape,
    unchanged,
)

_ELEMENTWISE = (
    "Abs", "Add", "And", "Cast", "Ceil", "Clip", "Cos", "Div", "Elu", "Equal", "Erf", "Exp", "Floor", "Gelu", "Greater",
    "GreaterOrEqual", "HardSwish", "Identity", "IsNaN", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Min", "Mod",
    "Mul", "Neg", "Not", "Or", "Pow", "PRelu", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Softplus",
    "Sqrt", "Sub", "Sum", "Tanh", "Where", "Xor",
)  # fmt: skip
_REDUCTIONS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSumSquare", "ReduceL2")


def _elementwise(node: Node, parts: Parts, facts: Facts) -> Needs | None:
    part, shape = first(parts), output_shape(node, facts)
    if shape is None:
        return None
    needed: list[Part | None] = []
    for place, value in enumerate(node.inputs):
        operand = input_shape(node, place, facts)
        if value is not None and operand is None:
            return None
        needed.append(None if operand is None else broadcast(part, shape, operand))
    return Needs(tuple(needed))


def _norm(node: Node, parts: Parts, facts: Facts) -> Needs | None:
    """RMSNormalization and LayerNormalization: the axes that are normalized have to be whole."""
    part, shape = first(parts), output_shape(node, facts)
    if shape is None or any(other is not None for other in parts[1:]):
        return None
    axis = node.attributes.get_int("axis", -1) % len(shape)
    if not only_whole(part, range(axis, len(shape))):
        return None
    return _elementwise(node, parts[:1], facts)


def _along_axis(node: Node, parts: Parts, facts: Facts) -> Needs | None:
    """Softmax and others whose result has the input's shape: the axis they look along has to be whole."""
    part, shape = first(parts), output_shape(node, facts)
    if shape is None:
        return None
    axis = node.attributes.get_int("axis", -1) % len(shape)
    return Needs((part,)) if only_whole(part, [axis]) else None


def _reduction(node: Node, parts: Parts, facts: Facts) -> Needs | None:
    part, source = first(parts), input_shape(node, 0, facts)
    if source is None:
        return None
    given = node.inputs[1] if len(node.inputs) > 1 else None
    constant = facts.constant(given)
    if given is not None and constant is None:
        return None
    axes = list(node.attributes.get_ints("axes", [])) if constant is None else [int(a) for a in constant.reshape(-1)]
    if not axes:
        if node.attributes.get_int("noop_with_empty_axes", 0):
            return Needs((part, *unchanged(node, facts)[1:]))
        axes = list(range(len(source)))
    reduced = {axis % len(source) for axis in axes}
    kept = iter(part)
    needed: list[tuple[tuple[int, int], ...] | None] = []
    for axis in range(len(source)):
        if axis not in reduced:
            needed.append(next(kept))
        else:
            needed.append(None)
            if node.attributes.get_int("keepdims", 1):
                next(kept)
    return Needs((tuple(needed), *unchanged(node, facts)[1:]))


def gate_columns(node: Node, ranges: tuple[tuple[int, int], ...], width: int) -> tuple[tuple[int, int], ...] | None:
    """Return the columns of gates and of what they gate, for columns of the result of a gated activation.

    node: with the attribute `layout`
    """
    if node.attributes.get_string("layout", "concat") == "interleaved":
        return normalized(((2 * start, 2 * stop) for start, stop in ranges), 2 * width)
    return normalized([*ranges, *((start + width, stop + width) for start, stop in ranges)], 2 * width)


def _gated(node: Node, parts: Parts, facts: Facts) -> Needs | None:
    part, shape = first(parts), output_shape(node, facts)
    if shape is None or not isinstance(shape[-1], int):
        return None
    columns = part[-1]
    return Needs(((*part[:-1], None if columns is None else gate_columns(node, columns, shape[-1])),))


RULES: Mapping[tuple[str, str], Rule] = {
    **{("", name): _elementwise for name in _ELEMENTWISE},
    **{("", name): _reduction for name in _REDUCTIONS},
    ("", "RMSNormalization"): _norm,
    ("", "LayerNormalization"): _norm,
    ("", "Softmax"): _along_axis,
    ("", "LogSoftmax"): _along_axis,
    (DOMAIN, "GatedActivation"): _gated,
}

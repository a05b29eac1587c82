"""What a rule says: which parts of its inputs a node needs, to compute a part of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from numpy.typing import NDArray

from inferencex.formats.graph import Node, Value
from inferencex.runtime.parallel.parts import Part, Shape, is_whole, whole


class Facts(Protocol):
    """What a rule may ask about values."""

    def shape(self, value: Value) -> Shape | None:
        """Return the shape of a value in the whole graph; None where the graph does not say."""
        ...

    def constant(self, value: Value | None) -> NDArray[Any] | None:
        """Return the elements of a small initializer inside the graph; None for anything else."""
        ...

    def is_static(self, value: Value | None) -> bool:
        """Tell whether a value is the same in every step."""
        ...


@dataclass(frozen=True)
class Needs:
    """What a node becomes that computes only a part of its outputs.

    inputs:     the part of each input; None where the node has none, or where it does without from now on
    attributes: those that change
    constants:  inputs that become constants, by place
    selects:    the part of the first input that each output is, for a node that does nothing but select
    """

    inputs: tuple[Part | None, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[int, NDArray[Any]] = field(default_factory=dict)
    selects: tuple[Part | None, ...] | None = None


class IndivisibleError(Exception):
    """Raised where a node can be divided, but not into these parts; its text says what the sizes are."""


Parts: TypeAlias = Sequence[Part | None]
"""The part wanted of each output; None for one that nobody reads."""

Rule: TypeAlias = Callable[[Node, Parts, Facts], Needs | None]
"""Returns None where a part of the outputs cannot be had from parts of the inputs."""


def first(parts: Parts) -> Part:
    """Return the part of the first output, which a node with one output has."""
    part = parts[0]
    assert part is not None, "a node with one output that nobody reads is not asked for parts of it"
    return part


def unchanged(node: Node, facts: Facts) -> list[Part | None]:
    """Return all of every input, to change some of them."""
    found: list[Part | None] = []
    for value in node.inputs:
        shape = None if value is None else facts.shape(value)
        found.append(None if value is None else whole(len(shape or ())))
    return found


def input_shape(node: Node, place: int, facts: Facts) -> Shape | None:
    """Return the shape of an input; None where there is none, or it is not known."""
    value = node.inputs[place] if place < len(node.inputs) else None
    return None if value is None else facts.shape(value)


def output_shape(node: Node, facts: Facts, place: int = 0) -> Shape | None:
    """Return the shape of an output; None where it is not known."""
    return facts.shape(node.outputs[place])


def only_whole(part: Part, axes: Sequence[int]) -> bool:
    """Tell whether a part has all of these axes."""
    return is_whole(tuple(part[axis] for axis in axes))


def broadcast(part: Part, shape: Shape, operand: Shape) -> Part:
    """Return the part of an operand that numpy's broadcasting reads for a part of the result."""
    behind = len(shape) - len(operand)
    return tuple(
        None if size == 1 and shape[axis + behind] != 1 else part[axis + behind] for axis, size in enumerate(operand)
    )

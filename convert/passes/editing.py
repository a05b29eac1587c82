"""Small vocabulary for rewriting an ONNX graph: read constants, make nodes, splice them in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

# Key in `Value.meta` under which an initializer carries the expression that computes it (see `weights.py`).
WEIGHT = "inferencex.weight"


def is_weight(value: ir.Value | None) -> bool:
    """Tell whether a value is a model parameter, or computed from parameters alone."""
    return value is not None and WEIGHT in value.meta


def constant_of(value: ir.Value | None) -> NDArray[Any] | None:
    """Return the value of a constant as an array, or None when it is computed, an input or a parameter."""
    if value is None or is_weight(value):
        return None
    if value.const_value is not None:
        return value.const_value.numpy()
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def scalar_of(value: ir.Value | None) -> float | None:
    """Return the value of a constant with one element, or None."""
    array = constant_of(value)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


def ints_of(value: ir.Value | None) -> list[int] | None:
    """Return a constant as a list of integers, or None."""
    array = constant_of(value)
    return None if array is None else [int(i) for i in array.reshape(-1)]


def attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    """Return the plain value of an attribute."""
    found = node.attributes.get(name)
    return default if found is None else found.value


def producer(value: ir.Value | None, op_type: str, domain: str | None = None) -> ir.Node | None:
    """Return the node that computes `value` if it is of this type, else None."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != op_type or (domain is not None and node.domain != domain):
        return None
    return node


def sole_user(value: ir.Value) -> ir.Node | None:
    """Return the only node that reads `value`, or None; a graph output has more readers than one."""
    uses = value.uses()
    return next(iter(uses)).node if len(uses) == 1 and not value.is_graph_output() else None


def shape_of(value: ir.Value) -> list[int | ir.SymbolicDim]:
    """Return a value's shape. Raises ValueError when it is unknown."""
    if value.shape is None:
        raise ValueError(f"value {value.name} of {value.producer()} has no shape")
    return list(value.shape)


def rank(value: ir.Value) -> int:
    """Return the number of dimensions of a value. Raises ValueError when its shape is unknown."""
    return len(shape_of(value))


def dims(value: ir.Value) -> list[int]:
    """Return a value's shape with -1 for every symbolic dimension. Raises ValueError when it is unknown."""
    return [d if isinstance(d, int) else -1 for d in shape_of(value)]


def static_dims(value: ir.Value) -> list[int]:
    """Return a value's shape. Raises ValueError when it is unknown or any dimension is symbolic."""
    shape = dims(value)
    if -1 in shape:
        raise ValueError(f"value {value.name} of {value.producer()} has shape {value.shape}; expected integers only")
    return shape


@dataclass
class Editor:
    """Creates nodes in one graph, sharing equal constants."""

    graph: ir.Graph

    def __post_init__(self) -> None:
        self._names = {str(v.name) for n in self.graph for v in n.outputs} | set(self.graph.initializers)
        self._names |= {str(v.name) for v in self.graph.inputs}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
        self._next = 0

    def fresh_name(self, stem: str) -> str:
        """Return a value name that the graph does not use yet."""
        name = stem
        while name in self._names:
            self._next += 1
            name = f"{stem}_{self._next}"
        self._names.add(name)
        return name

    def constant(self, array: NDArray[Any] | Sequence[int] | float, stem: str = "const") -> ir.Value:
        """Return an initializer holding `array`; lists become int64, floats float32."""
        if isinstance(array, float):
            array = np.asarray(array, dtype=np.float32)
        elif not isinstance(array, np.ndarray):
            array = np.asarray(array, dtype=np.int64)
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self._constants:
            tensor = ir.tensor(array, name=self.fresh_name(stem))
            value = ir.Value(
                name=tensor.name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
            )
            self.graph.register_initializer(value)
            self._constants[key] = value
        return self._constants[key]

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any] | None = None,
        *,
        domain: str = "",
        shape: Iterable[int | ir.SymbolicDim] | None = None,
        dtype: ir.DataType | None = ir.DataType.FLOAT,
        outputs: Sequence[ir.Value] | None = None,
        num_outputs: int = 1,
        stem: str | None = None,
    ) -> ir.Node:
        """Make a node that is not in the graph yet; the output's shape and dtype are as given, None where unknown."""
        trimmed = list(inputs)
        while trimmed and trimmed[-1] is None:
            trimmed.pop()
        if outputs is None:
            kinds = [None if dtype is None else ir.TensorType(dtype) for _ in range(num_outputs)]
            outputs = [ir.Value(name=self.fresh_name(stem or op_type.lower()), type=kind) for kind in kinds]
            if shape is not None:
                outputs[0].shape = ir.Shape(list(shape))
        return ir.node(op_type, trimmed, dict(attributes or {}), domain=domain, outputs=list(outputs))

    def before(self, anchor: ir.Node, *nodes: ir.Node) -> ir.Value:
        """Insert `nodes` before `anchor` and return the first output of the last."""
        self.graph.insert_before(anchor, list(nodes))
        return nodes[-1].outputs[0]

    def after(self, anchor: ir.Node, *nodes: ir.Node) -> ir.Value:
        """Insert `nodes` after `anchor` and return the first output of the last."""
        self.graph.insert_after(anchor, list(nodes))
        return nodes[-1].outputs[0]

    def substitute(self, old: ir.Value, new: ir.Value) -> None:
        """Let every reader of `old` read `new`, the graph's outputs included."""
        old.replace_all_uses_with(new, replace_graph_outputs=True)


def drop_dead(graph: ir.Graph) -> int:
    """Remove nodes nobody reads, and initializers nobody reads; returns how many nodes went."""
    removed = 0
    for node in reversed(list(graph)):
        if all(not v.uses() and not v.is_graph_output() for v in node.outputs):
            graph.remove(node, safe=True)
            removed += 1
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]
    return removed

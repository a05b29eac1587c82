"""What planning and cutting ask about a graph: shapes, small constants, what is fixed, and how many bytes it takes."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from inferencex.formats.dialect.names import DOMAIN
from inferencex.formats.dtypes import DataType, storage_nbytes
from inferencex.formats.graph import Graph, Node, Value, to_array
from inferencex.runtime.parallel.parts import Shape
from inferencex.runtime.parallel.rules.quantization import group_along

_MOST_ELEMENTS = 1 << 12
_INTEGERS = (DataType.INT64, DataType.INT32)
_SAME_SHAPE = (("", "Cast"), ("", "DequantizeLinear"), ("", "Identity"))


class GraphFacts:
    """Facts about one graph; see `rules.Facts`."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._static = set(graph.initializers)
        for node in graph:
            if all(value is None or value.name in self._static for value in node.inputs):
                self._static.update(value.name for value in node.outputs)
        self.symbols = {
            value.shape[0]: value for value in graph.inputs if value.shape is not None and len(value.shape) == 1
        }

    def is_known_shape(self, node: Node) -> bool:
        """Tell whether a node asks for a shape that is known without the value: up to the sizes of a step."""
        if (node.domain, node.op_type) != ("", "Shape") or node.inputs[0] is None:
            return False
        shape = self.shape(node.inputs[0])
        return shape is not None and all(isinstance(size, int) or size in self.symbols for size in shape)

    def shape(self, value: Value) -> Shape | None:
        """Return the shape of a value in the whole graph; None where the graph does not say."""
        node = value.producer()
        if value.shape is not None or node is None or not node.inputs or node.inputs[0] is None:
            return value.shape
        if (node.domain, node.op_type) in _SAME_SHAPE:
            return self.shape(node.inputs[0])
        if (node.domain, node.op_type) == (DOMAIN, "UnpackBits"):
            return tuple(node.attributes.get_ints("shape"))
        return None

    def constant(self, value: Value | None) -> NDArray[Any] | None:
        """Return the elements of a small initializer of integers inside the graph; None for anything else."""
        if value is None or value.constant is None or value.dtype not in _INTEGERS:
            return None
        array = to_array(value.constant)
        return array if array.size <= _MOST_ELEMENTS else None

    def is_static(self, value: Value | None) -> bool:
        """Tell whether a value is the same in every step."""
        return value is not None and value.name in self._static

    def is_static_node(self, node: Node) -> bool:
        """Tell whether a node computes the same in every step."""
        return all(value.name in self._static for value in node.outputs if value.name)

    def nbytes(self, value: Value | None) -> int:
        """Return what a fixed value takes as it is stored, with its scales and zero points."""
        if value is None:
            return 0
        node = value.producer()
        if node is None:
            shape = [size for size in value.shape or () if isinstance(size, int)]
            return storage_nbytes(value.dtype, shape) if value.is_initializer and value.dtype is not None else 0
        return sum(self.nbytes(operand) for operand in node.inputs)

    def unit_along(self, value: Value, axis: int) -> int:
        """Return how many neighbours along an axis of a fixed matrix have to stay together for their common scale."""
        node = value.producer()
        shape = self.shape(value)
        if node is None or shape is None or not node.inputs or node.inputs[0] is None:
            return 1
        own = group_along(node, axis, len(shape)) if (node.domain, node.op_type) == ("", "DequantizeLinear") else 1
        return max(own, self.unit_along(node.inputs[0], axis))

    def stored_name(self, value: Value | None) -> str:
        """Return the name of the tensor that a fixed value is stored as, or made of first."""
        assert value is not None
        node = value.producer()
        return value.name if node is None or not node.inputs else self.stored_name(node.inputs[0])

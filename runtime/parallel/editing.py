"""Making the nodes and values of a new graph, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from inferencex.formats import onnx_messages as onnx
from inferencex.formats.dtypes import DataType
from inferencex.formats.graph import Attributes, Graph, Node, Value
from inferencex.runtime.parallel.parts import Shape


class GraphBuilder:
    """Takes nodes one after the other; `graph` returns what became of them."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.initializers: dict[str, Value] = {}
        self._names: set[str] = set()

    def unused(self, name: str) -> str:
        """Return a name that nothing has yet, `name` itself if possible, and take it."""
        found, number = name, 0
        while found in self._names:
            number += 1
            found = f"{name}#{number}"
        self._names.add(found)
        return found

    def input(self, value: Value) -> Value:
        """Return an input of the new graph like one of another graph."""
        return Value(self.unused(value.name), value.dtype, value.shape)

    def initializer(self, name: str, dtype: DataType | None, shape: Shape | None, array: NDArray[Any] | None) -> Value:
        """Add an initializer with a new name; with its elements if it lies inside the graph."""
        unused = self.unused(name)
        constant = None
        if array is not None:
            dtype = _DTYPES[array.dtype.name] if dtype is None else dtype
            shape, data = array.shape, array.tobytes()
            constant = onnx.TensorProto(name=unused, data_type=int(dtype), dims=array.shape, raw_data=data)
        value = Value(unused, dtype, shape, constant=constant, is_initializer=True)
        self.initializers[unused] = value
        return value

    def constant(self, array: NDArray[Any]) -> Value:
        """Add numbers as an initializer inside the graph."""
        return self.initializer("constant", None, None, array)

    def add(
        self,
        op_type: str,
        inputs: Sequence[Value | None],
        outputs: Sequence[tuple[str, DataType | None, Shape | None]],
        attributes: Mapping[str, Any] | None = None,
        domain: str = "",
    ) -> list[Value]:
        """Add a node, and return its outputs: names, of which unused ones are made, types and shapes are given."""
        proto = onnx.NodeProto(op_type=op_type, domain=domain)
        for name, content in (attributes or {}).items():
            proto.attribute.append(_attribute(name, content))
        return self._append(proto, dict(attributes or {}), inputs, outputs)

    def copy(
        self,
        node: Node,
        inputs: Sequence[Value | None],
        outputs: Sequence[tuple[str, DataType | None, Shape | None]],
        changed: Mapping[str, Any],
    ) -> list[Value]:
        """Add a node like one of another graph, with other attributes in part."""
        proto = onnx.NodeProto(op_type=node.op_type, domain=node.domain, name=node.name)
        proto.attribute.extend(attribute for attribute in node.proto.attribute if attribute.name not in changed)
        for name, content in changed.items():
            proto.attribute.append(_attribute(name, content))
        return self._append(proto, {**node.attributes, **changed}, inputs, outputs)

    def graph(
        self, like: Graph, inputs: Sequence[Value], outputs: Sequence[Value], domains: Mapping[str, int]
    ) -> Graph:
        """Return the graph of all nodes so far."""
        return Graph(
            name=like.name,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            initializers=self.initializers,
            nodes=tuple(self.nodes),
            opset_imports={**like.opset_imports, **domains},
        )

    def _append(
        self,
        proto: onnx.NodeProto,
        attributes: Mapping[str, Any],
        inputs: Sequence[Value | None],
        outputs: Sequence[tuple[str, DataType | None, Shape | None]],
    ) -> list[Value]:
        given = list(inputs)
        while given and given[-1] is None:
            del given[-1]
        made = [Value(self.unused(name) if name else "", dtype, shape) for name, dtype, shape in outputs]
        proto.input.extend("" if value is None else value.name for value in given)
        proto.output.extend(value.name for value in made)
        label = proto.name or made[0].name
        node = Node(
            proto.name, proto.op_type, proto.domain, tuple(given), tuple(made), Attributes(label, attributes), proto
        )
        for value in given:
            if value is not None and (not value._consumers or value._consumers[-1] is not node):
                value._consumers.append(node)
        for value in made:
            value._producer = node
        self.nodes.append(node)
        return made


_DTYPES = {
    "float32": DataType.FLOAT,
    "int64": DataType.INT64,
    "int32": DataType.INT32,
    "bool": DataType.BOOL,
}


def _attribute(name: str, content: Any) -> onnx.AttributeProto:
    kinds = onnx.AttributeProto
    if isinstance(content, str):
        return kinds(name=name, type=kinds.STRING, s=content.encode())
    if isinstance(content, int):
        return kinds(name=name, type=kinds.INT, i=content)
    if isinstance(content, float):
        return kinds(name=name, type=kinds.FLOAT, f=content)
    if all(isinstance(item, int) for item in content):
        return kinds(name=name, type=kinds.INTS, ints=content)
    return kinds(name=name, type=kinds.FLOATS, floats=content)

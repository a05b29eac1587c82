"""The IR graph for those who only read it: nodes, values, attributes and the constants inside `model.onnx`.

The names are those of `onnx_ir`, which the converter edits graphs with, and which the runtime does without: it imports
sympy. Everything here is read-only and made once, by `read_graph`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from inferencex.formats import onnx_messages as onnx
from inferencex.formats.dtypes import DataType
from inferencex.formats.errors import BundleError

Dimension: TypeAlias = int | str | None
"""A size, the name of one that is known only when the graph runs, or nothing."""

_MOST_SHOWN = 80
_PLAIN_TYPES: dict[int, np.dtype[np.generic]] = {
    int(dtype): dtype.numpy().newbyteorder("<")
    for dtype in (
        DataType.FLOAT,
        DataType.DOUBLE,
        DataType.FLOAT16,
        DataType.INT64,
        DataType.INT32,
        DataType.INT8,
        DataType.UINT8,
        DataType.BOOL,
    )
}
_SINGLE_ATTRIBUTES = {
    onnx.AttributeProto.FLOAT: "f",
    onnx.AttributeProto.INT: "i",
    onnx.AttributeProto.STRING: "s",
    onnx.AttributeProto.TENSOR: "t",
    onnx.AttributeProto.SPARSE_TENSOR: "sparse_tensor",
    onnx.AttributeProto.GRAPH: "g",
    onnx.AttributeProto.TYPE_PROTO: "tp",
}
_ATTRIBUTE_FIELDS = _SINGLE_ATTRIBUTES | {
    onnx.AttributeProto.FLOATS: "floats",
    onnx.AttributeProto.INTS: "ints",
    onnx.AttributeProto.STRINGS: "strings",
    onnx.AttributeProto.TENSORS: "tensors",
    onnx.AttributeProto.SPARSE_TENSORS: "sparse_tensors",
    onnx.AttributeProto.GRAPHS: "graphs",
    onnx.AttributeProto.TYPE_PROTOS: "type_protos",
}


@dataclass(eq=False)
class Value:
    """Something that nodes read: a graph input, an initializer, or an output of a node.

    dtype, shape: None where the graph does not say
    constant:     the elements of an initializer that lies inside the graph; those of one that is stored in the weight
                  files come from `Bundle.tensor(name)`
    """

    name: str
    dtype: DataType | None = None
    shape: tuple[Dimension, ...] | None = None
    constant: onnx.TensorProto | None = field(default=None, repr=False)
    is_initializer: bool = False
    _producer: Node | None = field(default=None, repr=False)
    _consumers: list[Node] = field(default_factory=list, repr=False)

    def producer(self) -> Node | None:
        """Return the node whose output this is; None for inputs and initializers."""
        return self._producer

    def consumers(self) -> Sequence[Node]:
        """Return the nodes that read this, in the order of the graph, each once."""
        return self._consumers

    def numpy(self) -> NDArray[Any]:
        """Return the elements of an initializer inside the graph. Raises BundleError when there are none to read."""
        if self.constant is None:
            raise BundleError(f"the value {self.name[:_MOST_SHOWN]!r} is not a constant inside the graph")
        return to_array(self.constant)

    def __str__(self) -> str:
        if self.dtype is None:
            return f'%"{self.name}"'
        sizes = "?" if self.shape is None else ",".join("?" if size is None else str(size) for size in self.shape)
        return f'%"{self.name}"<{self.dtype.name},[{sizes}]>'


class Attributes(Mapping[str, Any]):
    """A node's attributes by name, as Python values: int, float, str, lists of these, and ONNX's own messages.

    The `get_...` methods say what type is expected: they raise BundleError, naming node and attribute, for another one,
    and where the attribute is missing and no default is given.
    """

    def __init__(self, node: str, attributes: Mapping[str, Any]) -> None:
        self._node = node
        self._attributes = attributes

    def __getitem__(self, name: str) -> Any:
        return self._attributes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._attributes)

    def __len__(self) -> int:
        return len(self._attributes)

    def get_int(self, name: str, default: int | None = None) -> int:
        """Return an integer."""
        value = self._get(name, default)
        if not isinstance(value, int):
            self._refuse(name, value, "an integer")
        return value

    def get_float(self, name: str, default: float | None = None) -> float:
        """Return a number."""
        value = self._get(name, default)
        if not isinstance(value, float):
            self._refuse(name, value, "a number")
        return value

    def get_string(self, name: str, default: str | None = None) -> str:
        """Return a text."""
        value = self._get(name, default)
        if not isinstance(value, str):
            self._refuse(name, value, "a text")
        return value

    def get_ints(self, name: str, default: Sequence[int] | None = None) -> Sequence[int]:
        """Return a list of integers."""
        value = self._get(name, default)
        if not isinstance(value, Sequence) or not all(isinstance(item, int) for item in value):
            self._refuse(name, value, "a list of integers")
        return value

    def get_tensor(self, name: str) -> NDArray[Any]:
        """Return a tensor as an array."""
        value = self._get(name, None)
        if not isinstance(value, onnx.TensorProto):
            self._refuse(name, value, "a tensor")
        return to_array(value)

    def _get(self, name: str, default: Any) -> Any:
        value = self._attributes.get(name, default)
        if value is None:
            raise BundleError(f"node {self._node[:_MOST_SHOWN]!r}: the attribute {name} is missing; it is needed")
        return value

    def _refuse(self, name: str, value: Any, expected: str) -> NoReturn:
        raise BundleError(
            f"node {self._node[:_MOST_SHOWN]!r}: the attribute {name} is {str(value)[:_MOST_SHOWN]!r}, "
            f"expected {expected}"
        )


@dataclass(eq=False)
class Node:
    """One operation. `inputs` has None where an optional input is left out; `proto` is the node as ONNX has it."""

    name: str
    op_type: str
    domain: str
    inputs: tuple[Value | None, ...]
    outputs: tuple[Value, ...]
    attributes: Attributes
    proto: onnx.NodeProto = field(repr=False)

    def __str__(self) -> str:
        outputs = ", ".join(str(value) for value in self.outputs)
        inputs = ", ".join("None" if value is None else f'%"{value.name}"' for value in self.inputs)
        attributes = ", ".join(f"{name}={_shown(value)}" for name, value in self.attributes.items())
        operator = f"{self.domain}::{self.op_type}" if self.domain else f"::{self.op_type}"
        return f"{outputs} = {operator}({inputs})" + (f" {{{attributes}}}" if attributes else "")


@dataclass(frozen=True, eq=False)
class Graph:
    """The nodes in an order in which they can run, and what goes in and comes out. Iterating gives the nodes."""

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    initializers: Mapping[str, Value]
    nodes: tuple[Node, ...]
    opset_imports: Mapping[str, int]

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)


def read_graph(model: onnx.ModelProto) -> Graph:
    """Read the main graph of a model; graphs inside of its nodes stay messages, among the attributes.

    Raises BundleError for a value that is used before it is made, or made twice, and for types that ONNX does not know.
    """
    proto = model.graph
    types = {value.name: value for value in (*proto.value_info, *proto.output)}
    values: dict[str, Value] = {}
    initializers = {tensor.name: _initializer(tensor) for tensor in proto.initializer}
    values.update(initializers)
    for value in proto.input:
        if value.name not in initializers:
            _define(values, _typed(value.name, value))
    inputs = tuple(values[value.name] for value in proto.input if value.name not in initializers)
    nodes = tuple(_node(node, index, values, types) for index, node in enumerate(proto.node))
    return Graph(
        name=proto.name,
        inputs=inputs,
        outputs=tuple(_used(values, value.name, "the graph's output") for value in proto.output),
        initializers=initializers,
        nodes=nodes,
        opset_imports={entry.domain: entry.version for entry in model.opset_import},
    )


def to_array(tensor: onnx.TensorProto) -> NDArray[Any]:
    """Return the elements of a tensor inside the graph.

    Raises BundleError when they do not fit its shape, or lie in another file: only initializers are stored in files.
    """
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        raise BundleError(f"the constant {tensor.name[:_MOST_SHOWN]!r} lies outside of the graph, and may not")
    try:
        array = _plain_array(tensor)
        if array is None:
            from onnx import numpy_helper  # here, for constants of a bundle seldom need it

            array = numpy_helper.to_array(tensor)
    except (ValueError, TypeError, KeyError) as error:
        raise BundleError(f"the constant {tensor.name[:_MOST_SHOWN]!r} cannot be read: {error}") from error
    return array


def _plain_array(tensor: onnx.TensorProto) -> NDArray[Any] | None:
    """Return the elements of a tensor of whole bytes, which lie there as numpy has them; None for any other."""
    dtype = _PLAIN_TYPES.get(tensor.data_type)
    if dtype is None or not tensor.HasField("raw_data") or tensor.HasField("segment"):
        return None
    return np.frombuffer(tensor.raw_data, dtype).reshape(tuple(tensor.dims))


def _node(
    proto: onnx.NodeProto, index: int, values: dict[str, Value], types: Mapping[str, onnx.ValueInfoProto]
) -> Node:
    label = proto.name or (proto.output[0] if proto.output else f"number {index}")
    inputs = tuple(_used(values, name, f"node {label[:_MOST_SHOWN]!r}") if name else None for name in proto.input)
    outputs = tuple(_typed(name, types.get(name)) for name in proto.output)
    attributes = {attribute.name: _attribute(attribute, label) for attribute in proto.attribute}
    node = Node(proto.name, proto.op_type, proto.domain, inputs, outputs, Attributes(label, attributes), proto)
    for value in inputs:
        if value is not None and (not value._consumers or value._consumers[-1] is not node):
            value._consumers.append(node)
    for value in outputs:
        value._producer = node
        if value.name:
            _define(values, value)
    return node


def _attribute(proto: onnx.AttributeProto, node: str) -> Any:
    if proto.ref_attr_name or proto.type == onnx.AttributeProto.UNDEFINED:
        raise BundleError(f"node {node[:_MOST_SHOWN]!r}: the attribute {proto.name[:_MOST_SHOWN]} has no value")
    field = _ATTRIBUTE_FIELDS.get(proto.type)
    if field is None:
        raise BundleError(f"node {node[:_MOST_SHOWN]!r}: the attribute {proto.name[:_MOST_SHOWN]} has an unknown type")
    value = getattr(proto, field)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if proto.type == onnx.AttributeProto.STRINGS:
        return [item.decode("utf-8", "replace") for item in value]
    return value if proto.type in _SINGLE_ATTRIBUTES else list(value)


def _initializer(tensor: onnx.TensorProto) -> Value:
    inline = tensor.data_location != onnx.TensorProto.EXTERNAL
    return Value(
        tensor.name,
        _dtype(tensor.data_type, tensor.name),
        tuple(tensor.dims),
        constant=tensor if inline else None,
        is_initializer=True,
    )


def _typed(name: str, info: onnx.ValueInfoProto | None) -> Value:
    if info is None or not info.type.HasField("tensor_type"):
        return Value(name)
    tensor = info.type.tensor_type
    shape: tuple[Dimension, ...] | None = None
    if tensor.HasField("shape"):
        shape = tuple(
            dimension.dim_value if dimension.HasField("dim_value") else dimension.dim_param or None
            for dimension in tensor.shape.dim
        )
    return Value(name, _dtype(tensor.elem_type, name) if tensor.elem_type else None, shape)


def _dtype(number: int, name: str) -> DataType:
    try:
        return DataType(number)
    except ValueError as error:
        raise BundleError(
            f"the value {name[:_MOST_SHOWN]!r} has element type {number}, which ONNX does not define"
        ) from error


def _define(values: dict[str, Value], value: Value) -> None:
    if value.name in values:
        raise BundleError(f"the value {value.name[:_MOST_SHOWN]!r} is made twice; every value of a graph is made once")
    values[value.name] = value


def _used(values: Mapping[str, Value], name: str, user: str) -> Value:
    value = values.get(name)
    if value is None:
        raise BundleError(f"{user} uses {name[:_MOST_SHOWN]!r}, which nothing before it makes")
    return value


def _shown(value: Any) -> str:
    if isinstance(value, onnx.TensorProto):
        array = to_array(value)
        shown = np.array2string(array, separator=", ", threshold=8).replace("\n", "")
        return f"{DataType(value.data_type).name.lower()}{shown}"
    return repr(value)[:_MOST_SHOWN]

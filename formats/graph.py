"""The IR graph for those who only read it: nodes, values, attributes and the constants inside `model.onnx`.

The names are those of `onnx_ir`, which the converter edits graphs with, and which the runtime does without: it imports
sympy. Everything here is read-only and made once, by `read_graph`, which each message is asked by only once: protocol
buffers make new objects whenever they are asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from inferencex.formats import onnx_messages as onnx
from inferencex.formats.dtypes import DataType
from inferencex.formats.errors import BundleError
from inferencex.formats.records import record

Dimension: TypeAlias = int | str | None
"""A size, the name of one that is known only when the graph runs, or nothing."""

MAX_DEPTH = 16
"""Of graphs inside of nodes."""

_MOST_SHOWN = 80
_DATA_TYPES: dict[int, DataType] = {int(dtype): dtype for dtype in DataType}
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
_UNDEFINED, _INT = onnx.AttributeProto.UNDEFINED, onnx.AttributeProto.INT
_EXTERNAL = onnx.TensorProto.EXTERNAL
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


@record(eq=False)
class Value:
    """Something that nodes read: a graph input, an initializer, or an output of a node.

    dtype, shape: None where the graph does not say
    constant:     the elements of an initializer that lies inside the graph; those of one that is stored in the weight
                  files come from `Bundle.tensor(name)`
    stored:       what the graph says about where those lie
    """

    name: str
    dtype: DataType | None = None
    shape: tuple[Dimension, ...] | None = None
    constant: onnx.TensorProto | None = field(default=None, repr=False)
    stored: onnx.TensorProto | None = field(default=None, repr=False)
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
    """A node's attributes by name, as Python values: int, float, str, `Graph`, lists of these, and ONNX's own messages.

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
        value = self._attributes.get(name, default)
        if isinstance(value, int):
            return value
        self._refuse(name, self._get(name, default), "an integer")

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


@record(eq=False)
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


@record(frozen=True, eq=False)
class Graph:
    """The nodes in an order in which they can run, and what goes in and comes out. Iterating gives the nodes.

    inner: the graphs inside of its nodes, and those inside of these
    """

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    initializers: Mapping[str, Value]
    nodes: tuple[Node, ...]
    opset_imports: Mapping[str, int]
    inner: tuple[Graph, ...] = field(default=(), repr=False)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)


def read_graph(model: onnx.ModelProto) -> Graph:
    """Read the graph of a model, and those inside of its nodes.

    Raises BundleError for a name that is no text, a value that is used before it is made, or made twice, an attribute
    without a value, sparse initializers, types that ONNX does not know, and graphs more than `MAX_DEPTH` deep.
    """
    return _read(model.graph, {}, {entry.domain: entry.version for entry in model.opset_import}, 0)


def _read(proto: onnx.GraphProto, outer: Mapping[str, Value], opset_imports: Mapping[str, int], depth: int) -> Graph:
    if depth > MAX_DEPTH:
        raise BundleError(f"graphs nested more than {MAX_DEPTH} deep")
    if proto.sparse_initializer:
        raise BundleError("sparse initializers are not part of this format")
    scope = _Scope(proto, outer, opset_imports, depth)
    initializers: dict[str, Value] = {}
    for tensor in proto.initializer:
        value = _initializer(tensor)
        if value.name in initializers:
            raise BundleError(f"two initializers are named {value.name!r}")
        initializers[value.name] = value
    scope.values.update(initializers)
    inputs = []
    for info in proto.input:
        if info.name not in initializers:
            inputs.append(scope.typed(info.name, info))
            scope.define(inputs[-1])
    nodes = tuple([scope.read_node(node, index) for index, node in enumerate(proto.node)])
    output_names = [info.name for info in proto.output]
    for name in output_names:
        if name not in scope.values:
            raise BundleError(f"the graph's output {name[:_MOST_SHOWN]!r} is made by no node")
    _check_texts(scope.values, nodes)
    return Graph(
        name=proto.name,
        inputs=tuple(inputs),
        outputs=tuple([scope.values[name] for name in output_names]),
        initializers=initializers,
        nodes=nodes,
        opset_imports=opset_imports,
        inner=tuple(scope.inner),
    )


def _check_texts(values: Mapping[str, Value], nodes: Sequence[Node]) -> None:
    """Refuse names that are not UTF-8, which protocol buffers hand over as bytes where the type says text."""
    texts: list[str] = [*values]
    for node in nodes:
        texts += (node.name, node.op_type, node.domain, *node.attributes)
    try:
        "".join(texts)  # looks at the types of thousands of them at once
    except TypeError:
        text = next(text for text in texts if not isinstance(text, str))
        raise BundleError(f"the name {text!r} is not valid UTF-8; the file is damaged") from None


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


class _Scope:
    """What a graph's nodes can see while they are read.

    values: by name, those of the graph so far, and those around it
    inner:  the graphs inside of its nodes
    """

    def __init__(
        self, proto: onnx.GraphProto, outer: Mapping[str, Value], opset_imports: Mapping[str, int], depth: int
    ) -> None:
        self.values: dict[str, Value] = dict(outer)
        self.inner: list[Graph] = []
        self._types = {info.name: info for info in (*proto.value_info, *proto.output)}
        self._forms: dict[bytes, tuple[DataType | None, tuple[Dimension, ...] | None]] = {}
        self._opset_imports = opset_imports
        self._depth = depth

    def define(self, value: Value) -> None:
        """Make a value known. Raises BundleError when there is one of its name."""
        if value.name in self.values:
            raise BundleError(
                f"the value {value.name[:_MOST_SHOWN]!r} is made twice; every value of a graph is made once"
            )
        self.values[value.name] = value

    def typed(self, name: str, info: onnx.ValueInfoProto | None) -> Value:
        """Return a value of this name, and of the type that the graph states for it, if it does."""
        if info is None:
            return Value(name)
        kind = info.type
        key = kind.SerializeToString()  # a graph has few types: to compare them is faster than to look at each
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = _form(kind, name)
        return Value(name, *form)

    def read_node(self, proto: onnx.NodeProto, index: int) -> Node:
        """Read the node of this number, and make its outputs known."""
        name, op_type, output_names = proto.name, proto.op_type, list(proto.output)
        label = name or (output_names[0] if output_names else f"number {index}")
        inputs: list[Value | None] = []
        known = self.values
        for input_name in proto.input:
            value = known.get(input_name) if input_name else None
            if value is None and input_name:
                raise BundleError(
                    f"node {label[:_MOST_SHOWN]!r} ({op_type[:40]}) uses {input_name[:_MOST_SHOWN]!r}, "
                    "which is neither an input, nor an initializer, nor made by an earlier node"
                )
            inputs.append(value)
        attributes = {attribute.name: self._attribute(attribute, label) for attribute in proto.attribute}
        outputs = tuple([self.typed(output, self._types.get(output)) for output in output_names])
        node = Node(name, op_type, proto.domain, tuple(inputs), outputs, Attributes(label, attributes), proto)
        for value in inputs:
            if value is not None:
                consumers = value._consumers
                if not consumers or consumers[-1] is not node:
                    consumers.append(node)
        for value in outputs:
            value._producer = node
            if value.name:
                self.define(value)
        return node

    def _attribute(self, proto: onnx.AttributeProto, node: str) -> Any:
        kind = proto.type
        if kind == _UNDEFINED or proto.ref_attr_name:
            raise BundleError(f"node {node[:_MOST_SHOWN]!r}: the attribute {proto.name[:_MOST_SHOWN]} has no value")
        if kind == _INT:  # as most are
            return proto.i
        found = _ATTRIBUTE_FIELDS.get(kind)
        if found is None:
            raise BundleError(
                f"node {node[:_MOST_SHOWN]!r}: the attribute {proto.name[:_MOST_SHOWN]} has an unknown type"
            )
        value = getattr(proto, found)
        if kind == onnx.AttributeProto.GRAPH:
            return self._inner(value)
        if kind == onnx.AttributeProto.GRAPHS:
            return [self._inner(graph) for graph in value]
        if isinstance(value, bytes):
            return value.decode("utf-8", "replace")
        if kind == onnx.AttributeProto.STRINGS:
            return [item.decode("utf-8", "replace") for item in value]
        return value if kind in _SINGLE_ATTRIBUTES else list(value)

    def _inner(self, proto: onnx.GraphProto) -> Graph:
        graph = _read(proto, self.values, self._opset_imports, self._depth + 1)
        self.inner += (graph, *graph.inner)
        return graph


def _initializer(tensor: onnx.TensorProto) -> Value:
    name = tensor.name
    dtype, shape = _dtype(tensor.data_type, name), tuple(tensor.dims)
    if tensor.data_location == _EXTERNAL:
        return Value(name, dtype, shape, None, tensor, True)
    return Value(name, dtype, shape, tensor, None, True)


def _form(kind: onnx.TypeProto, name: str) -> tuple[DataType | None, tuple[Dimension, ...] | None]:
    """Return the element type and shape that a value's type states, None for what it leaves open."""
    if not kind.HasField("tensor_type"):
        return None, None
    tensor = kind.tensor_type
    shape = tuple([_dimension(dimension) for dimension in tensor.shape.dim]) if tensor.HasField("shape") else None
    return _dtype(tensor.elem_type, name) if tensor.elem_type else None, shape


def _dimension(proto: onnx.TensorShapeProto.Dimension) -> Dimension:
    return proto.dim_value if proto.HasField("dim_value") else proto.dim_param or None


def _dtype(number: int, name: str) -> DataType:
    found = _DATA_TYPES.get(number)
    if found is None:
        raise BundleError(f"the value {name[:_MOST_SHOWN]!r} has element type {number}, which ONNX does not define")
    return found


def _shown(value: Any) -> str:
    if isinstance(value, onnx.TensorProto):
        array = to_array(value)
        shown = np.array2string(array, separator=", ", threshold=8).replace("\n", "")
        return f"{DataType(value.data_type).name.lower()}{shown}"
    return repr(value)[:_MOST_SHOWN]

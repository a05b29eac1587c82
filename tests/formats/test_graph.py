"""Reading a graph: what nodes read and make, what they are told, and graphs that make no sense."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from inferencex.formats.dtypes import DataType
from inferencex.formats.errors import BundleError
from inferencex.formats.graph import Graph, read_graph
from tests.formats.bundle.small import small_model


def make_model(change: Callable[[onnx.GraphProto], None] | None = None) -> onnx.ModelProto:
    """Return x[T, 4] -> Clip(x, , 1.0) -> Add(it, it) -> y; Add has an attribute of every kind."""
    nodes = [
        helper.make_node("Clip", ["x", "", "top"], ["clipped"], name="clip"),
        helper.make_node(
            "Add",
            ["clipped", "clipped"],
            ["y"],
            domain="inferencex",
            axis=-1,
            epsilon=0.5,
            mode="fast",
            sizes=[1, 2],
            factors=[0.5, 2.0],
            names=["a", "b"],
            table=numpy_helper.from_array(np.arange(3, dtype=np.int64), "table"),
        ),
    ]
    graph = helper.make_graph(
        nodes,
        "made",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, 4])],
        initializer=[numpy_helper.from_array(np.float32(1.0), "top")],
        value_info=[helper.make_tensor_value_info("clipped", TensorProto.FLOAT16, ["T", 4])],
    )
    if change is not None:
        change(graph)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23), helper.make_opsetid("inferencex", 1)])


@pytest.fixture
def graph() -> Graph:
    return read_graph(make_model())


def test_values_know_their_types_makers_and_readers(graph: Graph) -> None:
    clip, add = graph
    (x,), (y,), top = graph.inputs, graph.outputs, graph.initializers["top"]
    assert (x.dtype, x.shape, x.producer(), x.consumers()) == (DataType.FLOAT, ("T", 4), None, [clip])
    assert (y.shape, y.producer(), y.consumers()) == ((None, 4), add, [])
    assert clip.inputs == (x, None, top)
    (clipped,) = clip.outputs
    assert (clipped.dtype, clipped.shape) == (DataType.FLOAT16, ("T", 4))
    assert add.inputs == (clipped, clipped) and clipped.consumers() == [add], "a node that reads twice is named once"
    assert top.is_initializer and not x.is_initializer and top.numpy() == np.float32(1.0)
    assert graph.opset_imports == {"": 23, "inferencex": 1} and len(graph) == 2
    with pytest.raises(BundleError, match="'x' is not a constant"):
        x.numpy()


def test_attributes_are_python_values(graph: Graph) -> None:
    attributes = graph.nodes[1].attributes
    assert attributes.get_int("axis") == -1 and attributes.get_float("epsilon") == 0.5
    assert attributes.get_string("mode") == "fast" and attributes.get_ints("sizes") == [1, 2]
    assert attributes["factors"] == [0.5, 2.0] and attributes["names"] == ["a", "b"]
    assert attributes.get_tensor("table").tolist() == [0, 1, 2]
    assert attributes.get_int("absent", 7) == 7 and attributes.get_string("absent", "") == ""
    assert len(attributes) == 7 and "axis" in attributes


@pytest.mark.parametrize("method", ["get_int", "get_float", "get_string", "get_ints", "get_tensor"])
def test_attributes_of_another_type_are_refused_by_name(graph: Graph, method: str) -> None:
    attributes = graph.nodes[1].attributes
    with pytest.raises(BundleError, match=r"node 'y': the attribute absent is missing"):
        getattr(attributes, method)("absent")
    with pytest.raises(BundleError, match=r"node 'y': the attribute names is .*, expected"):
        getattr(attributes, method)("names")


def test_nodes_print_as_lines(graph: Graph) -> None:
    clip, add = graph
    assert str(clip) == '%"clipped"<FLOAT16,[T,4]> = ::Clip(%"x", None, %"top")'
    assert str(add).startswith('%"y"<FLOAT,[?,4]> = inferencex::Add(%"clipped", %"clipped") {axis=-1, epsilon=0.5,')
    assert "table=int64[0, 1, 2]" in str(add)


def test_it_agrees_with_onnx_ir() -> None:
    model = small_model()
    for name in ("up", "up.scales", "up.zero_points", "down"):
        model.graph.initializers[name].const_value = ir.tensor(np.ones(2, np.float32), name=name)
    graph = read_graph(ir.serde.serialize_model(model))
    for ours, theirs in zip(graph, model.graph, strict=True):
        assert (ours.op_type, ours.domain) == (theirs.op_type, theirs.domain)
        assert [v and v.name for v in ours.inputs] == [v and v.name for v in theirs.inputs]
        assert [v.name for v in ours.outputs] == [v.name for v in theirs.outputs]
        assert dict(ours.attributes) == {name: attribute.value for name, attribute in theirs.attributes.items()}
    assert list(graph.initializers) == list(model.graph.initializers)


def test_an_input_that_is_left_out_is_not_one_without_a_name() -> None:
    nameless = numpy_helper.from_array(np.float32(2.0), "")
    assert read_graph(make_model(lambda proto: proto.initializer.append(nameless))).nodes[0].inputs[1] is None


def _reorder(graph: onnx.GraphProto) -> None:
    last = graph.node.pop()
    graph.node.insert(0, last)


def _short(graph: onnx.GraphProto) -> None:
    graph.node[1].attribute[6].t.raw_data = b"\0\0\0"


def _outside(graph: onnx.GraphProto) -> None:
    tensor = graph.node[1].attribute[6].t
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/hostname")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_reorder, r"node 'y' \(Add\) uses 'clipped', which is neither an input, nor an initializer, nor made by"),
        (lambda graph: graph.node.append(graph.node[0]), "'clipped' is made twice"),
        (lambda graph: graph.node[0].output.append("x"), "'x' is made twice"),
        (
            lambda graph: graph.output.append(helper.make_empty_tensor_value_info("z")),
            "output 'z' is made by no node",
        ),
        (lambda graph: setattr(graph.initializer[0], "data_type", 99), "'top' has element type 99"),
        (
            lambda graph: setattr(graph.node[1].attribute[0], "ref_attr_name", "z"),
            "'y': the attribute axis has no value",
        ),
        (lambda graph: setattr(graph.node[1].attribute[0], "type", 0), "'y': the attribute axis has no value"),
    ],
)
def test_graphs_that_make_no_sense_are_refused(change: Callable[[onnx.GraphProto], None], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        read_graph(make_model(change))


@pytest.mark.parametrize(("change", "message"), [(_short, "cannot be read"), (_outside, "lies outside of the graph")])
def test_constants_are_refused_when_they_are_read(change: Callable[[onnx.GraphProto], None], message: str) -> None:
    damaged = read_graph(make_model(change))
    with pytest.raises(BundleError, match=f"the constant 'table' {message}"):
        damaged.nodes[1].attributes.get_tensor("table")


def _nest(of: onnx.GraphProto, depth: int = 1, change: Callable[[onnx.GraphProto], object] | None = None) -> None:
    """Put a graph that reads `x` of the graph around it into the last node, and others into that."""
    node = helper.make_node("Neg", ["x"], ["negated"])
    inner = helper.make_graph([node], "inner", [], [helper.make_empty_tensor_value_info("negated")])
    if change is not None:
        change(inner)
    if depth > 1:
        _nest(inner, depth - 1, change)
    of.node[-1].attribute.append(helper.make_attribute("body", inner))


def test_graphs_inside_of_nodes_are_read_too() -> None:
    graph = read_graph(make_model(lambda proto: _nest(proto, 3)))
    first, second, third = graph.inner
    assert graph.nodes[1].attributes["body"] is first and first.inner == (second, third)
    (negation,) = third
    assert negation.inputs == graph.inputs and negation in graph.inputs[0].consumers()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda graph: _nest(graph, 17), "nested more than 16 deep"),
        (
            # y is made only by the node around it
            lambda graph: _nest(graph, 1, lambda inner: inner.node[0].input.__setitem__(0, "y")),
            "uses 'y', which is neither an input, nor an initializer, nor made by an earlier node",
        ),
        (
            lambda graph: _nest(graph, 2, lambda inner: inner.sparse_initializer.add()),
            "sparse initializers are not part",
        ),
        (lambda graph: graph.sparse_initializer.add(), "sparse initializers are not part"),
        (lambda graph: graph.initializer.append(graph.initializer[0]), "two initializers are named 'top'"),
    ],
)
def test_graphs_inside_of_nodes_are_held_to_the_same(change: Callable[[onnx.GraphProto], None], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        read_graph(make_model(change))


@pytest.mark.parametrize("name", [b"clipped", b"clip", b"Clip", b"epsilon", b"inferencex", b"top", b"x"])
def test_names_that_are_no_text_are_refused(name: bytes) -> None:
    data = make_model().SerializeToString()
    assert name in data
    model = onnx.ModelProto()
    model.ParseFromString(data.replace(name, b"\xff" + name[1:]))
    with pytest.raises(BundleError, match="not valid UTF-8"):
        read_graph(model)

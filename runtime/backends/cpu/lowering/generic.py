"""ONNX operators that the native module has under their own names, on strided operands."""

from __future__ import annotations

import math

from inferencex.formats.dtypes import DataType
from inferencex.formats.graph import Node
from inferencex.runtime.backends.cpu.lowering.context import AttributeValue, Lowering, input_of
from inferencex.runtime.backends.cpu.lowering.extents import ONE, Extent
from inferencex.runtime.backends.cpu.lowering.integers import integer_list, known_integers
from inferencex.runtime.backends.cpu.lowering.views import View, broadcast_dims
from inferencex.runtime.backends.graph.static_values import NATIVE_TYPES

_SAME_TYPE = {
    "Abs", "Neg", "Sqrt", "Exp", "Log", "Sin", "Cos", "Tanh", "Sigmoid", "Relu", "Erf", "Floor", "Ceil", "Round",
    "Reciprocal", "Sign", "Softplus", "HardSwish", "LeakyRelu", "Elu", "Gelu", "Add", "Sub", "Mul", "Div", "Pow", "Mod",
    "Max", "Min", "Sum", "PRelu", "Clip", "Not", "And", "Or", "Xor",
}  # fmt: skip
_TRUTHS = {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "IsNaN"}
_COMPUTED_TYPES = frozenset(("f32", "i64", "i32", "bool"))
_REDUCTIONS = {"ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSumSquare", "ReduceL2"}


def lower_generic(lowering: Lowering, node: Node) -> bool:
    """Lower a node to the native operation of its name; False where there is none for it."""
    if node.domain != "" or node.op_type not in lowering.native_kinds:
        return False
    typed = [lowering.view(value).dtype for value in node.inputs if value is not None]
    if node.op_type not in ("Cast", "CastLike") and not _COMPUTED_TYPES.issuperset(typed):
        return False
    try:
        if node.op_type in _SAME_TYPE | _TRUTHS or node.op_type in ("Where", "Cast", "CastLike"):
            return _elementwise(lowering, node)
        if node.op_type in _REDUCTIONS:
            return _reduction(lowering, node)
        handler = _HANDLERS.get(node.op_type)
        return handler is not None and handler(lowering, node)
    except ValueError:  # shapes that do not broadcast as far as they are known
        return False


def _plain_attributes(node: Node) -> dict[str, AttributeValue]:
    return {
        name: list(value) if isinstance(value, list) else value
        for name, value in node.attributes.items()
        if isinstance(value, int | float | str) or (isinstance(value, list) and all(isinstance(i, int) for i in value))
    }


def _elementwise(lowering: Lowering, node: Node) -> bool:
    # Which optional input is missing matters (Clip's bounds), so absent ones stay in their place.
    inputs: list[View | None] = [None if v is None else lowering.view(v) for v in node.inputs]
    attributes = _plain_attributes(node)
    present = [view for view in inputs if view is not None]
    shaped = present[:1] if node.op_type in ("Clip", "CastLike") else present
    dims = broadcast_dims([view.dims for view in shaped])
    if node.op_type in _TRUTHS:
        dtype = "bool"
    elif node.op_type == "Cast":
        to = NATIVE_TYPES.get(DataType(node.attributes.get_int("to")))
        if to is None:
            return False
        dtype = to[0]
    elif node.op_type in ("Where", "CastLike"):
        dtype = present[1].dtype
    else:
        dtype = present[0].dtype
    if node.op_type == "CastLike":
        inputs, attributes = inputs[:1], {}
        node_kind = "Cast"
    else:
        node_kind = node.op_type
    y = lowering.define(node.outputs[0], dtype, dims)
    lowering.emit(node_kind, node.outputs[0].name, inputs, [y], **attributes)
    return True


def _axis(node: Node, rank: int, default: int) -> int:
    axis = node.attributes.get_int("axis", default)
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} of rank {rank}")
    return axis % rank


def _reduction(lowering: Lowering, node: Node) -> bool:
    x = lowering.view(node.inputs[0])
    if input_of(node, 1) is not None:
        axes = integer_list(lowering, input_of(node, 1))
    else:
        axes = list(node.attributes.get_ints("axes", []))
    if axes is None or any(not -x.rank <= axis < x.rank for axis in axes):
        return False
    if not axes:
        if node.attributes.get_int("noop_with_empty_axes", 0):
            lowering.views[node.outputs[0].name] = x
            return True
        axes = list(range(x.rank))
    axes = sorted(axis % x.rank for axis in axes)
    kept = [ONE if i in axes else size for i, size in enumerate(x.dims)]
    if not node.attributes.get_int("keepdims", 1):
        kept = [size for i, size in enumerate(kept) if i not in axes]
    y = lowering.define(node.outputs[0], x.dtype, kept)
    lowering.emit(node.op_type, node.outputs[0].name, [x], [y], axes=axes)
    return True


def _along_axis(lowering: Lowering, node: Node) -> bool:
    """Softmax, LogSoftmax, CumSum: the output has the input's shape."""
    x = lowering.view(node.inputs[0])
    attributes = _plain_attributes(node)
    if node.op_type == "CumSum":
        axes = integer_list(lowering, input_of(node, 1))
        if axes is None or not -x.rank <= axes[0] < x.rank:
            return False
        attributes["axis"] = axes[0] % x.rank
    else:
        attributes["axis"] = _axis(node, x.rank, -1)
    y = lowering.define(node.outputs[0], x.dtype, x.dims)
    lowering.emit(node.op_type, node.outputs[0].name, [x], [y], **attributes)
    return True


def _concat(lowering: Lowering, node: Node) -> bool:
    inputs = [lowering.view(value) for value in node.inputs]
    axis = _axis(node, inputs[0].rank, 0)
    if any(view.rank != inputs[0].rank or not view.dims[axis].is_constant for view in inputs):
        return False
    width = Extent(sum(view.dims[axis].coefficient for view in inputs))
    dims = (*inputs[0].dims[:axis], width, *inputs[0].dims[axis + 1 :])
    y = lowering.define(node.outputs[0], inputs[0].dtype, dims)
    lowering.emit("Concat", node.outputs[0].name, inputs, [y], axis=axis)
    return True


def _gather(lowering: Lowering, node: Node) -> bool:
    data, index = lowering.view(node.inputs[0]), lowering.view(node.inputs[1])
    axis = _axis(node, data.rank, 0)
    dims = (*data.dims[:axis], *index.dims, *data.dims[axis + 1 :])
    y = lowering.define(node.outputs[0], data.dtype, dims)
    lowering.emit("Gather", node.outputs[0].name, [data, index], [y], axis=axis)
    return True


def _by_elements(lowering: Lowering, node: Node) -> bool:
    """GatherElements and ScatterElements."""
    inputs = [lowering.view(value) for value in node.inputs]
    gathers = node.op_type == "GatherElements"
    attributes = _plain_attributes(node)
    attributes["axis"] = _axis(node, inputs[0].rank, 0)
    y = lowering.define(node.outputs[0], inputs[0].dtype, inputs[1].dims if gathers else inputs[0].dims)
    lowering.emit(node.op_type, node.outputs[0].name, inputs, [y], **attributes)
    return True


def _top_k(lowering: Lowering, node: Node) -> bool:
    x, count = lowering.view(node.inputs[0]), integer_list(lowering, input_of(node, 1))
    if count is None or len(count) != 1 or count[0] < 1:
        return False
    axis = _axis(node, x.rank, -1)
    dims = (*x.dims[:axis], Extent(count[0]), *x.dims[axis + 1 :])
    attributes = _plain_attributes(node)
    attributes["axis"] = axis
    outputs = [lowering.define(node.outputs[0], x.dtype, dims), lowering.define(node.outputs[1], "i64", dims)]
    lowering.emit("TopK", node.outputs[0].name, [x], outputs, **attributes)
    return True


def _arg(lowering: Lowering, node: Node) -> bool:
    x = lowering.view(node.inputs[0])
    attributes = _plain_attributes(node)
    axis = _axis(node, x.rank, 0)
    attributes["axis"] = axis
    kept = [ONE] if node.attributes.get_int("keepdims", 1) else []
    y = lowering.define(node.outputs[0], "i64", (*x.dims[:axis], *kept, *x.dims[axis + 1 :]))
    lowering.emit(node.op_type, node.outputs[0].name, [x], [y], **attributes)
    return True


def _matmul(lowering: Lowering, node: Node) -> bool:
    a, b = (lowering.view(node.inputs[i]) for i in (0, 1))
    if a.rank < 2 or b.rank < 2:
        return False
    batch = broadcast_dims([a.dims[:-2], b.dims[:-2]])
    y = lowering.define(node.outputs[0], a.dtype, (*batch, a.dims[-2], b.dims[-1]))
    lowering.emit("MatMul", node.outputs[0].name, [a, b], [y])
    return True


def _tile(lowering: Lowering, node: Node) -> bool:
    x, repeats = lowering.view(node.inputs[0]), integer_list(lowering, input_of(node, 1))
    if repeats is None or len(repeats) != x.rank:
        return False
    dims = [size * Extent(count) for size, count in zip(x.dims, repeats, strict=True)]
    y = lowering.define(node.outputs[0], x.dtype, dims)
    lowering.emit("Tile", node.outputs[0].name, [x], [y])
    return True


def lower_fill(lowering: Lowering, node: Node) -> bool:
    """Lower ConstantOfShape."""
    shape = known_integers(lowering, node.inputs[0])
    if shape is None:
        return False
    dims = (shape,) if isinstance(shape, Extent) else shape
    dtype, value = "f32", 0.0
    if "value" in node.attributes:
        array = node.attributes.get_tensor("value")
        named = {"float32": "f32", "int64": "i64", "bool": "bool", "int32": "i32"}.get(array.dtype.name)
        if named is None or array.size != 1:
            return False
        dtype, value = named, float(array.reshape(-1)[0])
        if named != "f32" and not math.isfinite(value):
            return False
    y = lowering.define(node.outputs[0], dtype, dims)
    lowering.emit("Fill", node.outputs[0].name, [], [y], value=value)
    return True


_HANDLERS = {
    "Softmax": _along_axis,
    "LogSoftmax": _along_axis,
    "CumSum": _along_axis,
    "Concat": _concat,
    "Gather": _gather,
    "GatherElements": _by_elements,
    "ScatterElements": _by_elements,
    "TopK": _top_k,
    "ArgMax": _arg,
    "ArgMin": _arg,
    "MatMul": _matmul,
    "Tile": _tile,
}

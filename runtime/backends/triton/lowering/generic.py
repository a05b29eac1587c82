"""Everything without a kernel of its own: shapes on the host, torch's operators on the device, ONNX's reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inferencex.formats.dtypes import DataType
from inferencex.formats.errors import BackendError
from inferencex.formats.graph import Node, Value, to_array
from inferencex.formats.onnx_messages import TensorProto
from inferencex.runtime.backends.graph.evaluation import evaluate
from inferencex.runtime.backends.graph.static_values import StoredWeight
from inferencex.runtime.backends.reference.operators import OPERATORS
from inferencex.runtime.backends.triton.lowering.constants import stored_tensor
from inferencex.runtime.backends.triton.lowering.context import Lowering, Read
from inferencex.runtime.backends.triton.lowering.program import Values
from inferencex.runtime.backends.triton.step_inputs import StepInputs
from inferencex.runtime.backends.triton.weights.layout import unpack_stream

_MADE_OF_SHAPES = {"ConstantOfShape", "Range"}  # their results are as large as the step's values: made on the device
_READ_ON_HOST: dict[str, tuple[int, ...]] = {
    "ConstantOfShape": (0,), "CumSum": (1,), "Expand": (1,), "OneHot": (1,), "Pad": (1, 3), "Range": (0, 1, 2),
    "ReduceL1": (1,), "ReduceL2": (1,), "ReduceMax": (1,), "ReduceMean": (1,), "ReduceMin": (1,), "ReduceSum": (1,),
    "ReduceSumSquare": (1,), "Reshape": (1,), "Slice": (1, 2, 3, 4), "Split": (1,), "Squeeze": (1,), "Tile": (1,),
    "TopK": (1,), "Trilu": (1,), "Unsqueeze": (1,),
}  # fmt: skip
"""Inputs that say what to do with the others, and that torch wants as numbers of the host."""

_ASK_THE_DEVICE = {"Experts", "ExpertLinear"}
"""Operators that choose what to launch by numbers of the device, where no kernel does: experts that a step computes."""

_IN_FLOAT32 = {"Exp", "Log", "LogSoftmax", "Pow", "ReduceL1", "ReduceL2", "ReduceMean", "ReduceSum", "ReduceSumSquare",
               "Softmax", "Softplus", "Sqrt", "Reciprocal", "CumSum"}  # fmt: skip
"""What 8 or 11 bits of precision are too few for; the routing of experts, above all."""


def lower_embedding(lowering: Lowering, node: Node) -> bool:
    """Lower a lookup of rows in a stored table, which stays as it is stored."""
    table, index = node.inputs[0], node.inputs[1]
    if table is None or not lowering.is_static(table) or lowering.is_static(index):
        return False
    if node.attributes.get_int("axis", 0) != 0 or table.dtype is not DataType.FLOAT:
        return False
    stored = lowering.constants.static.weight(table)
    if stored is None or len(stored.shape) != 2 or stored.format in ("f4e2m1",):
        return False
    look_up, rows = _table(lowering, stored), lowering.read(index)

    def run(values: Values, step: StepInputs) -> tuple[Tensor]:
        index = rows(values)
        return (look_up(index.reshape(-1)).view(*index.shape, -1),)

    lowering.emit(node, "torch", run)
    return True


def _table(lowering: Lowering, stored: StoredWeight) -> Callable[[Tensor], Tensor]:
    """Return what looks up rows `[n]` of a table `[V, W]` and gives them in the type of activations."""
    device, dtype = lowering.device, lowering.dtype
    if stored.scales is None:
        plain = lowering.constants.plain_weight(stored)
        return lambda index: plain.index_select(0, index)
    rows, width = stored.shape
    group = width if stored.group < 0 else stored.group
    values = _integers(stored, stored.values, (rows, width), device)
    scales = stored_tensor(stored.scales, device).view(rows, -1)
    zeros = None
    if stored.zero_points is not None:
        zeros = _integers(stored, stored.zero_points, (rows, scales.shape[1]), device)
    place = torch.arange(width, device=device) // group

    def look_up(index: Tensor) -> Tensor:
        numbers = values.index_select(0, index).to(torch.float32)
        if zeros is not None:
            numbers = numbers - zeros.index_select(0, index).to(torch.float32).index_select(1, place)
        return (numbers * scales.index_select(0, index).to(torch.float32).index_select(1, place)).to(dtype)

    return look_up


def _integers(stored: StoredWeight, part: Any, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Return packed numbers as one byte each, or as they are."""
    tensor = stored_tensor(part, device)
    bits = {"int3": 3, "int4": 4, "int5": 5, "int6": 6}.get(stored.format)
    if bits is None:
        return tensor.view(shape)
    numbers = unpack_stream(tensor, shape[0] * shape[1], bits).view(shape)
    if not stored.is_signed:
        return numbers
    half = 1 << (bits - 1)
    return ((numbers ^ half).to(torch.int8) - half).to(torch.int8)


def lower_generic(lowering: Lowering, node: Node) -> None:
    """Lower a node to an operator of torch, or to `onnx.reference`. Raises BackendError when neither knows it."""
    function = OPERATORS.get((node.domain, node.op_type))
    if node.op_type in ("Shape", "Size") or _follows_from_shapes(lowering, node):
        lowering.on_host.update(value.name for value in node.outputs)
        if function is None:
            raise BackendError(f"no implementation computes shapes with {node.op_type}")
        inputs = [_shape_input(lowering, value, node) for value in node.inputs]
        _emit(lowering, node, "host", function, inputs, None)
    elif function is None:
        _lower_to_reference(lowering, node)
    else:
        on_host = _READ_ON_HOST.get(node.op_type, ())
        inputs = [
            None if value is None else lowering.read(value, on_host=place in on_host and _is_known(lowering, value))
            for place, value in enumerate(node.inputs)
        ]
        numbers = [value for place, value in enumerate(node.inputs) if value is not None and place in on_host]
        if node.op_type in _ASK_THE_DEVICE or not all(_is_known(lowering, value) for value in numbers):
            lowering.waiting[node.op_type] += 1
        _emit(lowering, node, "torch", function, inputs, lowering.device)


def _is_known(lowering: Lowering, value: Value) -> bool:
    """Tell whether a value is on the host when a step is launched; torch waits for the device to learn others."""
    return lowering.is_static(value) or value.name in lowering.on_host


def _follows_from_shapes(lowering: Lowering, node: Node) -> bool:
    """Tell whether a node computes numbers of the host alone, from sizes of the step's values."""
    if node.op_type in _MADE_OF_SHAPES:
        return False
    taken = [value for value in node.inputs if value is not None]
    return all(_is_known(lowering, value) for value in taken) and any(v.name in lowering.on_host for v in taken)


def _shape_input(lowering: Lowering, value: Value | None, node: Node) -> Read | None:
    if value is None:
        return None
    if node.op_type in ("Shape", "Size") and not _is_known(lowering, value):
        name = value.name
        return lambda values: values[name]
    return lowering.read(value, on_host=True)


def _emit(
    lowering: Lowering,
    node: Node,
    runs_on: str,
    function: Callable[..., Any],
    inputs: list[Read | None],
    device: torch.device | None,
) -> None:
    attributes = {name: _attribute(value) for name, value in node.attributes.items()}
    widens = node.op_type in _IN_FLOAT32
    single = node.op_type in _BROADCASTING

    def run(values: Values, step: StepInputs) -> tuple[Tensor, ...]:
        operands = [None if read is None else read(values) for read in inputs]
        if widens:
            operands = [
                x.to(torch.float32) if x is not None and x.dtype in (torch.float16, torch.bfloat16) else x
                for x in operands
            ]
        if single:
            operands = _without_promotion(operands)
        if device is None:
            result = function(*operands, **attributes)
        else:
            with device:
                result = function(*operands, **attributes)
        return result if isinstance(result, tuple) else (result,)

    lowering.emit(node, runs_on, run)


_BROADCASTING = {"Add", "Div", "Max", "Min", "Mul", "Pow", "Sub", "Where", "Clip"}


def _without_promotion(operands: list[Tensor | None]) -> list[Tensor | None]:
    """Return operands with single float32 numbers in the type of narrower activations, which they must not widen."""
    narrow = next(
        (x.dtype for x in operands if x is not None and x.numel() > 1 and x.dtype in (torch.float16, torch.bfloat16)),
        None,
    )
    if narrow is None:
        return operands
    return [x.to(narrow) if x is not None and x.numel() == 1 and x.dtype == torch.float32 else x for x in operands]


def _attribute(value: Any) -> Any:
    if isinstance(value, TensorProto):
        return torch.from_numpy(np.array(to_array(value)))
    return value


def _lower_to_reference(lowering: Lowering, node: Node) -> None:
    inputs = [None if value is None else lowering.read(value) for value in node.inputs]
    device = lowering.device

    def run(values: Values, step: StepInputs) -> tuple[Tensor, ...]:
        arrays = [None if read is None else _host_array(read(values)) for read in inputs]
        return tuple(torch.from_numpy(np.array(result)).to(device) for result in evaluate(node, arrays))

    lowering.fallbacks[f"{node.domain}::{node.op_type}" if node.domain else node.op_type] += 1
    lowering.emit(node, "onnx.reference", run)


def _host_array(x: Tensor) -> Any:
    return (x.to(torch.float32) if x.is_floating_point() else x).cpu().numpy()

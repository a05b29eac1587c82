"""Execute nodes of an IR graph one by one in torch.

Used by the backend on whole bundles, by passes to check a rewritten region against the original, and by calibration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from inferencex.runtime.backends.reference import fallback
from inferencex.runtime.backends.reference.operators import OPERATORS

Handler = Callable[[ir.Node, list[Tensor | None], dict[str, Any]], Any]
Bound = Callable[[list[Tensor | None]], tuple[Tensor, ...]]
Environment = MutableMapping[str, Tensor]


def to_tensor(value: ir.TensorProtocol) -> Tensor:
    """Turn an ONNX tensor into a torch one of the same dtype, or of a wider one where torch has none.

    4-bit integers become int8 / uint8, 4-bit floats float16, scales that are powers of two float32.
    """
    match value.dtype:
        case ir.DataType.BFLOAT16:
            return torch.from_numpy(value.numpy().view(np.uint16).copy()).view(torch.bfloat16)
        case ir.DataType.INT4:
            return torch.from_numpy(value.numpy().astype(np.int8))
        case ir.DataType.UINT4:
            return torch.from_numpy(value.numpy().astype(np.uint8))
        case ir.DataType.FLOAT8E4M3FN:
            return torch.from_numpy(value.numpy().view(np.uint8).copy()).view(torch.float8_e4m3fn)
        case ir.DataType.FLOAT4E2M1:
            return torch.from_numpy(value.numpy().astype(np.float16))
        case ir.DataType.FLOAT8E8M0:
            return torch.from_numpy(value.numpy().astype(np.float32))
    array = value.numpy()
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def attributes_of(node: ir.Node) -> dict[str, Any]:
    """Return a node's attributes as plain Python values, tensors as torch tensors."""
    found: dict[str, Any] = {}
    for name, attribute in node.attributes.items():
        value = attribute.value
        found[name] = to_tensor(value) if attribute.type == ir.AttributeType.TENSOR else value
    return found


def constant(node: ir.Node) -> Tensor:
    """Return the value of a Constant node."""
    (attribute,) = node.attributes.values()
    value = attribute.value
    match attribute.type:
        case ir.AttributeType.TENSOR:
            return to_tensor(value)
        case ir.AttributeType.INT | ir.AttributeType.INTS:
            return torch.tensor(value, dtype=torch.int64)
        case ir.AttributeType.FLOAT | ir.AttributeType.FLOATS:
            return torch.tensor(value, dtype=torch.float32)
    raise ValueError(f"constant {node.outputs[0].name} has unsupported attribute type {attribute.type}")


def bind(node: ir.Node) -> Bound:
    """Look up a node's implementation and attributes once; the result maps inputs to outputs, any number of times."""
    if node.op_type == "Constant":
        value = constant(node)
        return lambda inputs: (value,)
    function = OPERATORS.get((node.domain if node.domain != "ai.onnx" else "", node.op_type))
    if function is None:
        return lambda inputs: fallback.run(node, inputs)
    attributes = attributes_of(node)

    def run(inputs: list[Tensor | None]) -> tuple[Tensor, ...]:
        result = function(*inputs, **attributes)
        return result if isinstance(result, tuple) else (result,)

    return run


def run_node(node: ir.Node, inputs: list[Tensor | None], special: Handler | None = None) -> tuple[Tensor, ...]:
    """Execute one node; `special` is asked first and returns None for what it does not handle."""
    if special is not None and node.op_type != "Constant":
        result = special(node, inputs, attributes_of(node))
        if result is not None:
            return result if isinstance(result, tuple) else (result,)
    return bind(node)(inputs)


def run_nodes(nodes: Iterable[ir.Node], environment: Environment, special: Handler | None = None) -> None:
    """Execute `nodes` in order; values are read from and written to `environment` by name."""
    for node in nodes:
        inputs: list[Tensor | None] = []
        for value in node.inputs:
            if value is None:
                inputs.append(None)
                continue
            name = str(value.name)
            if name not in environment and value.const_value is not None:
                environment[name] = to_tensor(value.const_value)
            inputs.append(environment[name])
        for output, result in zip(node.outputs, run_node(node, inputs, special), strict=False):
            environment[str(output.name)] = result

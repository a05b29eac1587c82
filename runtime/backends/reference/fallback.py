"""Run an operator that has no torch implementation here through ONNX's own reference evaluator."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor

from inferencex.formats.errors import BackendError


def run(node: ir.Node, inputs: list[Tensor | None]) -> tuple[Tensor, ...]:
    """Execute one standard node. Raises BackendError naming it when ONNX's reference has no implementation."""
    names = [f"i{i}" if tensor is not None else "" for i, tensor in enumerate(inputs)]
    outputs = [f"o{i}" for i in range(len(node.outputs))]
    attributes: dict[str, Any] = {a.name: a.value for a in node.attributes.values() if isinstance(a, ir.Attr)}
    proto = onnx.helper.make_node(node.op_type, names, outputs, domain=node.domain, **attributes)
    feeds = {n: t.numpy() for n, t in zip(names, inputs, strict=True) if t is not None}
    graph = onnx.helper.make_graph(
        [proto],
        "node",
        [
            onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in feeds.items()
        ],
        [onnx.helper.make_empty_tensor_value_info(n) for n in outputs],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 23)])
    try:
        results = ReferenceEvaluator(model).run(None, feeds)
    except (NotImplementedError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise BackendError(
            f"operator {node.domain or 'ai.onnx'}::{node.op_type} cannot be executed: {error}"
        ) from error
    return tuple(torch.from_numpy(np.asarray(result)) for result in results)

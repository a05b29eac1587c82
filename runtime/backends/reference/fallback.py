"""Run an operator that has no torch implementation here through ONNX's own reference evaluator."""

from __future__ import annotations

import onnx_ir as ir
import torch
from torch import Tensor

from inferencex.formats.errors import BackendError
from inferencex.runtime.backends.onnx_node import EVALUATION_FAILURES, evaluate_node


def run(node: ir.Node, inputs: list[Tensor | None]) -> tuple[Tensor, ...]:
    """Execute one standard node. Raises BackendError naming it when ONNX's reference has no implementation."""
    arrays = [None if tensor is None else tensor.numpy() for tensor in inputs]
    try:
        results = evaluate_node(ir.to_proto(node), arrays)
    except EVALUATION_FAILURES as error:
        raise BackendError(
            f"operator {node.domain or 'ai.onnx'}::{node.op_type} cannot be executed: {error}"
        ) from error
    return tuple(torch.from_numpy(result) for result in results)

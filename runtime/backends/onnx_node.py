"""One operator, executed by ONNX's own reference evaluator: what backends fall back to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from inferencex.formats.dialect.names import OPSET

Array = NDArray[Any]

EVALUATION_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What the evaluator raises for operators it does not know, and for operands that do not go together."""


def evaluate_node(node: onnx.NodeProto, inputs: Sequence[Array | None]) -> tuple[Array, ...]:
    """Execute a node on arrays, whatever its inputs and outputs are called. Raises `EVALUATION_FAILURES`."""
    names = [f"i{i}" if array is not None else "" for i, array in enumerate(inputs)]
    outputs = [f"o{i}" for i in range(len(node.output))]
    renamed = onnx.NodeProto()
    renamed.CopyFrom(node)
    del renamed.input[:], renamed.output[:]
    renamed.input.extend(names)
    renamed.output.extend(outputs)
    feeds = {name: np.asarray(array) for name, array in zip(names, inputs, strict=True) if array is not None}
    kinds = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    results = [onnx.helper.make_empty_tensor_value_info(name) for name in outputs]
    graph = onnx.helper.make_graph([renamed], "node", kinds, results)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", OPSET)])
    return tuple(np.asarray(result) for result in ReferenceEvaluator(model).run(None, feeds))

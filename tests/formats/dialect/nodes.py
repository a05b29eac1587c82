"""Models of one node of domain `inferencex`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper
from onnx.reference import ReferenceEvaluator

from inferencex.formats import dialect

Shape = Sequence[int | str | None]


def model_of(
    op_type: str,
    inputs: Mapping[str, Shape | None],
    attributes: Mapping[str, Any],
    *,
    outputs: Sequence[str] = ("y",),
    output_shapes: Mapping[str, Shape] | None = None,
    dtypes: Mapping[str, int] | None = None,
) -> onnx.ModelProto:
    """Return a model that is one node; an input whose shape is None is absent."""
    dialect.register()
    dtypes = dtypes or {}
    names = ["" if shape is None else name for name, shape in inputs.items()]
    while names and not names[-1]:
        names.pop()
    node = helper.make_node(op_type, names, list(outputs), domain=dialect.DOMAIN, **attributes)
    first = dtypes.get(names[0], onnx.TensorProto.FLOAT)
    graph = helper.make_graph(
        [node],
        "one_node",
        [
            helper.make_tensor_value_info(name, dtypes.get(name, onnx.TensorProto.FLOAT), shape)
            for name, shape in inputs.items()
            if shape is not None
        ],
        [helper.make_tensor_value_info(name, first, (output_shapes or {}).get(name, [None, None])) for name in outputs],
    )
    opsets = [helper.make_opsetid("", dialect.OPSET), helper.make_opsetid(dialect.DOMAIN, dialect.VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=11)


def evaluate(
    op_type: str,
    inputs: Mapping[str, NDArray[Any] | None],
    attributes: Mapping[str, Any],
    outputs: Sequence[str] = ("y",),
) -> list[NDArray[Any]]:
    """Run one node through `onnx.reference`."""
    shapes = {name: None if array is None else array.shape for name, array in inputs.items()}
    dtypes = {n: helper.np_dtype_to_tensor_dtype(a.dtype) for n, a in inputs.items() if a is not None}
    model = model_of(op_type, shapes, attributes, outputs=outputs, dtypes=dtypes)
    onnx.checker.check_model(model, full_check=True)
    feeds = {name: array for name, array in inputs.items() if array is not None}
    return [np.asarray(y) for y in ReferenceEvaluator(model, new_ops=dialect.new_ops()).run(None, feeds)]

"""Give every value a shape: the exporter leaves out those that its own translations introduced."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from inferencex.convert.passes.editing import attribute

_SAME_SHAPE = {
    "Sigmoid",
    "Sqrt",
    "Reciprocal",
    "Neg",
    "Tanh",
    "Exp",
    "Cast",
    "Identity",
    "Erf",
    "Relu",
    "Not",
    "Sin",
    "Cos",
    "Abs",
    "Softplus",
}


def infer_shapes(model: ir.Model) -> None:
    """Fill in missing shapes and dtypes, cheaply where the operator is simple, else by ONNX's own inference."""
    missing = False
    for node in model.graph:
        output = node.outputs[0]
        if all(v.shape is not None and v.dtype is not None for v in node.outputs):
            continue
        source = node.inputs[0] if node.inputs else None
        if source is not None and source.shape is not None and node.op_type in _SAME_SHAPE:
            output.shape = ir.Shape(list(source.shape))
            if output.dtype is None and source.dtype is not None and node.op_type != "Cast":
                output.dtype = source.dtype
        elif source is not None and source.shape is not None and node.op_type == "Transpose":
            perm = attribute(node, "perm")
            output.shape = ir.Shape([source.shape[p] for p in perm])
            if source.dtype is not None:
                output.dtype = source.dtype
        if any(v.shape is None or v.dtype is None for v in node.outputs):
            missing = True
    if missing:
        common.ShapeInferencePass()(model)

"""What a graph gains to read weights as they are stored, and to quantize what they are multiplied with.

All of it is ONNX, but for two operators of the dialect: `UnpackBits` for integers of 3, 5 and 6 bits, `QuantizeRows`
for activations that get their scale when they come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from inferencex.convert.passes.editing import Editor
from inferencex.convert.quantize.scheme import ActivationScheme
from inferencex.formats.dialect import DOMAIN
from inferencex.formats.dtypes import DataType
from inferencex.formats.errors import QuantizationError
from inferencex.formats.packing import QuantizedTensor

OPSET_OF_POWER_OF_TWO_SCALES = 24
"""The first in which DequantizeLinear takes scales of FLOAT8E8M0."""

_ACTIVATION_TYPES = {
    "int8": (ir.DataType.INT8, np.dtype(np.int8)),
    "fp8": (ir.DataType.FLOAT8E4M3FN, np.dtype(ml_dtypes.float8_e4m3fn)),
}
_FLOAT_OUTPUT = {"output_dtype": ir.DataType.FLOAT.value}


class StoredForms:
    """Inserts nodes into the graph of `model`, whose nodes must not have moved since this was made."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._graph = model.graph
        self._edit = Editor(model.graph)
        self._places = {node: place for place, node in enumerate(model.graph)}
        self._quantized: dict[tuple[str, ActivationScheme, float | None], ir.Value] = {}

    def cast(self, value: ir.Value) -> None:
        """Let all readers of a weight in 16 bits read it as float32."""
        self._read_through(value, [self._node("Cast", [value], {"to": ir.DataType.FLOAT.value}, value, "float")])

    def dequantize(self, value: ir.Value, tensor: QuantizedTensor) -> ir.Value:
        """Let all readers of a weight read what its stored form means; return that value.

        `value` becomes the stored values; scales, zero points and the tensor's scale become initializers of the names
        that `BundleWriter.add_quantized` stores them under.
        """
        shape = ir.Shape(tensor.shape)
        value.dtype = ir.DataType(tensor.dtype)
        value.shape = ir.Shape(tensor.stored_shape(tensor.shape))
        nodes: list[ir.Node] = []
        values, zero_points = value, self._beside(value, "zero_points") if tensor.zero_points is not None else None
        if tensor.is_bit_stream:
            values = self._unpack(value, tensor, tensor.shape, nodes)
            zero_points = None if zero_points is None else self._unpack(zero_points, tensor, tensor.scale_shape, nodes)
        scales = self._beside(value, "scales")
        if tensor.tensor_scale is not None:
            inputs = [scales, self._beside(value, "tensor_scale")]
            nodes.append(self._node("DequantizeLinear", inputs, _FLOAT_OUTPUT, scales, "float"))
            nodes[-1].outputs[0].shape = ir.Shape(tensor.scale_shape)
            scales = nodes[-1].outputs[0]
        elif tensor.scale_dtype is DataType.FLOAT8E8M0:
            opsets = self._model.graph.opset_imports
            opsets[""] = max(opsets.get("", 0), OPSET_OF_POWER_OF_TWO_SCALES)
        inputs = [values, scales, *([] if zero_points is None else [zero_points])]
        nodes.append(self._node("DequantizeLinear", inputs, {**tensor.attributes, **_FLOAT_OUTPUT}, value, "float"))
        nodes[-1].outputs[0].shape = shape
        return self._read_through(value, nodes)

    def quantize_inputs(self, weight: ir.Value, scheme: ActivationScheme, scale: float | None) -> None:
        """Quantize what linears multiply with `weight`, as `dequantize` returned it.

        `scale` is that of a static scheme. Linears with the same input share its quantized form. Raises
        QuantizationError for a static scheme without a scale, and for one that is not positive and finite.
        """
        if scheme.static and not (scale is not None and 0 < scale < float("inf")):
            raise QuantizationError(
                f"{weight.name}: static {scheme.type} activations need a scale from calibration, found {scale}"
            )
        for use in list(weight.uses()):
            source = use.node.inputs[0]
            if use.node.op_type != "Gemm" or use.idx != 1 or source is None:
                raise QuantizationError(f"{weight.name}: {use.node.op_type} is no linear whose input can be quantized")
            key = (str(source.name), scheme, scale if scheme.static else None)
            if key not in self._quantized:
                self._quantized[key] = self._quantize(source, scheme, scale)
            use.node.replace_input_with(0, self._quantized[key])

    def _quantize(self, source: ir.Value, scheme: ActivationScheme, scale: float | None) -> ir.Value:
        dtype, numpy_type = _ACTIVATION_TYPES[scheme.type]
        if scheme.static:
            name = self._edit.fresh_name(f"{source.name}.scale")
            scale_value = self._constant(name, np.array(scale, dtype=np.float32))
            zero = self._constant(f"{name}.zero_point", np.zeros((), dtype=numpy_type))
            quantize = self._edit.node(
                "QuantizeLinear", [source, scale_value, zero], shape=source.shape, dtype=dtype, stem="quantized"
            )
            inputs, attributes = [quantize.outputs[0], scale_value, zero], dict(_FLOAT_OUTPUT)
        else:
            outputs = [
                ir.Value(name=self._edit.fresh_name("quantized"), type=ir.TensorType(dtype), shape=source.shape),
                ir.Value(name=self._edit.fresh_name("quantized.scales"), type=ir.TensorType(ir.DataType.FLOAT)),
            ]
            if source.shape is not None:
                outputs[1].shape = ir.Shape(list(source.shape)[:1])
            quantize = self._edit.node("QuantizeRows", [source], {"to": dtype.value}, domain=DOMAIN, outputs=outputs)
            inputs, attributes = outputs, {"axis": 0, **_FLOAT_OUTPUT}
        dequantize = self._edit.node("DequantizeLinear", inputs, attributes, shape=source.shape, stem="dequantized")
        for node in (quantize, dequantize):
            node.name = node.outputs[0].name
        producer = source.producer()
        if producer is None:
            raise QuantizationError(f"{source.name}: an input of the graph cannot be quantized")
        self._graph.insert_after(producer, [quantize, dequantize])
        return dequantize.outputs[0]

    def _constant(self, name: str, array: np.ndarray[Any, Any]) -> ir.Value:
        value = ir.Value(name=name, const_value=ir.Tensor(array, name=name))
        value.type, value.shape = ir.TensorType(value.const_value.dtype), ir.Shape(array.shape)  # type: ignore[union-attr]
        self._graph.initializers[name] = value
        return value

    def _beside(self, value: ir.Value, suffix: str) -> ir.Value:
        companion = ir.Value(name=f"{value.name}.{suffix}")
        self._graph.initializers[f"{value.name}.{suffix}"] = companion
        return companion

    def _unpack(
        self, packed: ir.Value, tensor: QuantizedTensor, shape: tuple[int, ...], nodes: list[ir.Node]
    ) -> ir.Value:
        attributes = {"bits": tensor.bits, "shape": list(shape), "signed": int(tensor.symmetric)}
        nodes.append(self._node("UnpackBits", [packed], attributes, packed, "unpacked", DOMAIN))
        unpacked = nodes[-1].outputs[0]
        unpacked.dtype = ir.DataType.INT8 if tensor.symmetric else ir.DataType.UINT8
        unpacked.shape = ir.Shape(shape)
        return unpacked

    def _node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value],
        attributes: Mapping[str, Any],
        value: ir.Value,
        suffix: str,
        domain: str = "",
    ) -> ir.Node:
        stem = f"{value.name}.{suffix}"
        node = self._edit.node(op_type, list(inputs), attributes, domain=domain, shape=value.shape, stem=stem)
        node.name = node.outputs[0].name
        return node

    def _read_through(self, value: ir.Value, nodes: Sequence[ir.Node]) -> ir.Value:
        """Insert nodes, the first of which reads a stored weight, and let its other readers read the last one."""
        result = nodes[-1].outputs[0]
        users = [use for use in value.uses() if use.node not in nodes]
        self._graph.insert_before(min((use.node for use in users), key=self._places.__getitem__), list(nodes))
        for use in users:
            use.node.replace_input_with(use.idx, result)
        return result

"""`QuantizeRows` and `UnpackBits`, alone and in the graphs that bundles make of them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from inferencex.formats import dialect
from inferencex.formats.packing import pack_bits
from inferencex.runtime.backends.reference.operators import OPERATORS

Array = NDArray[Any]
TYPES = {TensorProto.INT8: np.dtype(np.int8), TensorProto.FLOAT8E4M3FN: np.dtype(ml_dtypes.float8_e4m3fn)}


def _run(nodes: list[onnx.NodeProto], feeds: dict[str, Array], outputs: list[str]) -> list[Array]:
    """Check and execute a graph; types and shapes of its values are inferred."""
    dialect.register()
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    graph = helper.make_graph(nodes, "graph", inputs, [helper.make_empty_tensor_value_info(name) for name in outputs])
    opsets = [helper.make_opsetid("", dialect.OPSET), helper.make_opsetid(dialect.DOMAIN, dialect.VERSION)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    known = {value.name: value for value in inferred.graph.output}
    results = [np.asarray(y) for y in ReferenceEvaluator(model, new_ops=dialect.new_ops()).run(None, feeds)]
    for name, result in zip(outputs, results, strict=True):
        kind = known[name].type.tensor_type
        assert kind.elem_type == helper.np_dtype_to_tensor_dtype(result.dtype)
        assert [d.dim_value for d in kind.shape.dim] == list(result.shape)
    return results


def _quantize(x: Array, to: int) -> list[Array]:
    """Return values, scales, and what they stand for."""
    nodes = [
        helper.make_node("QuantizeRows", ["x"], ["values", "scales"], domain=dialect.DOMAIN, to=to),
        helper.make_node("DequantizeLinear", ["values", "scales"], ["y"], axis=0, output_dtype=TensorProto.FLOAT),
    ]
    return _run(nodes, {"x": x}, ["values", "scales", "y"])


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 5),
    st.integers(1, 40),
    st.sampled_from(sorted(TYPES)),
    st.floats(-25, 25),
    st.integers(0, 2**32 - 1),
)
def test_rows_are_quantized_by_their_largest(tokens: int, width: int, to: int, magnitude: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((tokens, width)) * 10.0**magnitude).astype(np.float32)
    values, scales, y = _quantize(x, to)
    assert (values.dtype, scales.dtype) == (TYPES[to], np.float32)
    assert values.shape == x.shape and scales.shape == (tokens,)
    largest = np.abs(x).max(axis=1, initial=0)
    limit = {TensorProto.INT8: 127, TensorProto.FLOAT8E4M3FN: 448}[to]
    np.testing.assert_array_equal(scales, largest / np.float32(limit))
    np.testing.assert_array_equal(np.abs(values.astype(np.float32)).max(axis=1, initial=0), np.full(tokens, limit))
    # Half a step: of the row for integers, of the value (3 bits behind the leading one) for floats.
    step = np.ones_like(x) if to == TensorProto.INT8 else np.maximum(np.abs(x) / scales[:, None] / 8, 2.0**-9)
    assert np.all(np.abs(y - x) <= scales[:, None] * step * 0.5001)


@pytest.mark.parametrize("to", sorted(TYPES))
def test_rows_without_a_scale(to: int) -> None:
    x = np.array([[0, 0], [2.0**-120, 0], [np.nan, 1], [np.inf, 1], [-448, 127]], dtype=np.float32)
    values, scales, y = _quantize(x, to)
    np.testing.assert_array_equal(scales[:4], [0, 0, np.nan, np.nan])
    np.testing.assert_array_equal(values[:4].astype(np.float32), 0)
    np.testing.assert_array_equal(y[:2], 0)
    assert np.isnan(y[2:4]).all() and np.isfinite(y[4]).all()


@pytest.mark.parametrize("to", sorted(TYPES))
def test_rows_are_quantized_in_torch_alike(to: int) -> None:
    x = np.random.default_rng(0).standard_normal((7, 33)).astype(np.float32)
    values, scales, _ = _quantize(x, to)
    in_torch = OPERATORS[dialect.DOMAIN, "QuantizeRows"](torch.from_numpy(x), to=to)
    np.testing.assert_array_equal(in_torch[0].view(torch.uint8).numpy(), values.view(np.uint8))
    np.testing.assert_array_equal(in_torch[1].numpy(), scales)


@pytest.mark.parametrize("to", sorted(TYPES))
def test_static_quantization_in_torch_equals_onnx(to: int) -> None:
    x = np.random.default_rng(1).standard_normal((7, 33)).astype(np.float32) * 30
    scale, zero_point = np.array(0.2, np.float32), np.zeros((), TYPES[to])
    node = helper.make_node("QuantizeLinear", ["x", "scale", "zero_point"], ["y"])
    (expected,) = _run([node], {"x": x, "scale": scale, "zero_point": zero_point}, ["y"])
    tensors = [torch.from_numpy(x), torch.from_numpy(scale), torch.from_numpy(zero_point.view(np.uint8))]
    if to == TensorProto.FLOAT8E4M3FN:
        tensors[2] = tensors[2].view(torch.float8_e4m3fn)
    else:
        tensors[2] = tensors[2].view(torch.int8)
    found = OPERATORS["", "QuantizeLinear"](*tensors)
    np.testing.assert_array_equal(found.view(torch.uint8).numpy(), expected.view(np.uint8))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple),
    st.integers(1, 8),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_bits_are_unpacked(shape: tuple[int, ...], bits: int, signed: bool, seed: int) -> None:
    low, high = (-(1 << (bits - 1)), 1 << (bits - 1)) if signed else (0, 1 << bits)
    values = np.random.default_rng(seed).integers(low, high, shape).astype(np.int8 if signed else np.uint8)
    node = helper.make_node(
        "UnpackBits", ["packed"], ["values"], domain=dialect.DOMAIN, bits=bits, shape=list(shape), signed=int(signed)
    )
    packed = pack_bits(values, bits)
    (found,) = _run([node], {"packed": packed}, ["values"])
    np.testing.assert_array_equal(found, values)
    assert found.dtype == values.dtype
    function = OPERATORS[dialect.DOMAIN, "UnpackBits"]
    in_torch = function(torch.from_numpy(packed), bits=bits, shape=list(shape), signed=int(signed))
    np.testing.assert_array_equal(in_torch.numpy(), values)


@pytest.mark.parametrize(
    ("op_type", "inputs", "attributes", "message"),
    [
        ("QuantizeRows", {"x": (2, 3)}, {"to": TensorProto.UINT8}, "to is 2"),
        ("QuantizeRows", {"x": (2, 3, 4)}, {"to": TensorProto.INT8}, "3 dimensions"),
        ("UnpackBits", {"packed": (4,)}, {"bits": 3, "shape": [8]}, "number of bytes"),
        ("UnpackBits", {"packed": (4,)}, {"bits": 9, "shape": [2]}, "9 bits"),
        ("UnpackBits", {"packed": (4,)}, {"bits": 3, "shape": [-8]}, "shape"),
    ],
)
def test_nodes_that_contradict_themselves(
    op_type: str, inputs: dict[str, tuple[int, ...]], attributes: dict[str, Any], message: str
) -> None:
    dialect.register()
    kind = TensorProto.UINT8 if op_type == "UnpackBits" else TensorProto.FLOAT
    outputs = ["y", "scales"][: 2 if op_type == "QuantizeRows" else 1]
    node = helper.make_node(op_type, list(inputs), outputs, domain=dialect.DOMAIN, **attributes)
    values = [helper.make_tensor_value_info(name, kind, shape) for name, shape in inputs.items()]
    graph = helper.make_graph([node], "graph", values, [helper.make_empty_tensor_value_info("y")])
    opsets = [helper.make_opsetid("", dialect.OPSET), helper.make_opsetid(dialect.DOMAIN, dialect.VERSION)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    with pytest.raises(onnx.shape_inference.InferenceError, match=message):
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)

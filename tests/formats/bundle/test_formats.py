"""Bundles with values in streams of bits, with floats of 8 and 4 bits, and with scales that have a scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

pytest.importorskip("transformers", reason="needs the extra inferencex[convert]")

from inferencex.convert.stored_forms import StoredForms
from inferencex.formats import dialect
from inferencex.formats.bundle import Bundle, BundleWriter, Manifest
from inferencex.formats.errors import BundleError
from inferencex.formats.packing import PER_CHANNEL, QuantizedTensor, pack_bits
from tests.formats.bundle.test_reader import edit_graph, edit_manifest

SHAPE = (6, 96)


def _tensor(kind: str) -> QuantizedTensor:
    rng = np.random.default_rng(0)
    if kind in ("int3", "int5", "int6"):
        bits = int(kind[-1])
        values, zero_points = (
            pack_bits(rng.integers(0, 1 << bits, shape).astype(np.uint8), bits) for shape in (SHAPE, (SHAPE[0], 3))
        )
        scales = rng.uniform(0.5, 1, (SHAPE[0], 3)).astype(np.float16)
        return QuantizedTensor(values, scales, zero_points, bits, 32, False, SHAPE)
    if kind == "int3 symmetric":
        values = pack_bits(rng.integers(-4, 4, SHAPE).astype(np.int8), 3)
        return QuantizedTensor(values, np.ones((SHAPE[0], 3), np.float32), None, 3, 32, True, SHAPE)
    if kind == "fp8":
        numbers = rng.standard_normal(SHAPE).astype(ml_dtypes.float8_e4m3fn)
        return QuantizedTensor(numbers, np.ones(SHAPE[0], np.float16), None, 8, PER_CHANNEL, True, SHAPE, "e4m3")
    values, group = pack_bits(rng.integers(0, 16, SHAPE).astype(np.uint8), 4), 16 if kind == "nvfp4" else 32
    numbers = rng.uniform(0.25, 4, (SHAPE[0], SHAPE[1] // group))
    if kind == "mxfp4":
        return QuantizedTensor(values, numbers.astype(ml_dtypes.float8_e8m0fnu), None, 4, group, True, SHAPE, "e2m1")
    scales = numbers.astype(ml_dtypes.float8_e4m3fn)
    return QuantizedTensor(values, scales, None, 4, group, True, SHAPE, "e2m1", np.array(0.5, np.float32))


KINDS = ("int3", "int3 symmetric", "int5", "int6", "fp8", "nvfp4", "mxfp4")


def _write(path: Path, kind: str) -> QuantizedTensor:
    """Write a bundle whose graph returns its only weight."""
    tensor = _tensor(kind)
    weight = ir.Value(name="w", shape=ir.Shape(SHAPE), type=ir.TensorType(ir.DataType.FLOAT))
    node = ir.node("Identity", [weight])
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    node.outputs[0].shape = ir.Shape(SHAPE)
    opsets = {"": dialect.OPSET, dialect.DOMAIN: dialect.VERSION}
    graph = ir.Graph([], node.outputs, nodes=[node], initializers=[weight], opset_imports=opsets, name="weight")
    model = ir.Model(graph, ir_version=11)
    StoredForms(model).dequantize(weight, tensor)
    with BundleWriter(path) as writer:
        writer.add_quantized("w", tensor, method="rtn")
        writer.write_graph(model)
        writer.seal(Manifest())
        writer.commit()
    return tensor


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_what_was_written(tmp_path: Path, kind: str) -> None:
    written = _write(tmp_path / "b", kind)
    bundle = Bundle.open(tmp_path / "b", verify=True)
    read = bundle.quantized("w")
    assert (read.bits, read.number, read.group_size, read.shape) == (
        written.bits, written.number, written.group_size, written.shape
    )  # fmt: skip
    np.testing.assert_array_equal(read.dequantize(), written.dequantize())
    assert sum(stored.nbytes for stored in bundle.stored.values()) == written.nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_any_tool_that_reads_onnx_reads_the_weight(tmp_path: Path, kind: str) -> None:
    written = _write(tmp_path / "b", kind)
    dialect.register()
    onnx.checker.check_model(str(tmp_path / "b" / "model.onnx"), full_check=True)
    model = onnx.load(tmp_path / "b" / "model.onnx")
    (y,) = ReferenceEvaluator(model, new_ops=dialect.new_ops()).run(None, {})
    np.testing.assert_array_equal(np.asarray(y), written.dequantize())


def _attribute(graph: onnx.GraphProto, op_type: str, name: str) -> onnx.AttributeProto:
    node = next(node for node in graph.node if node.op_type == op_type)
    return next(attribute for attribute in node.attribute if attribute.name == name)


def _bits(model: onnx.ModelProto, bits: int) -> None:
    _attribute(model.graph, "UnpackBits", "bits").i = bits


def _shape(model: onnx.ModelProto, shape: list[int]) -> None:
    _attribute(model.graph, "UnpackBits", "shape").ints[:] = shape


def _block(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "block_size":
                attribute.i = 8


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("int3", lambda m: _bits(m, 4), "need UINT8"),
        ("int3", lambda m: _bits(m, 9), "9 bits, expected 1 to 8"),
        ("int3", lambda m: _shape(m, [6, 95]), "UINT8"),
        ("int3", lambda m: _shape(m, [2**40, 2**40]), "not one a tensor can have"),
        ("int3", lambda m: _shape(m, [-6, -96]), "not one a tensor can have"),
        ("nvfp4", _block, "scales 'w.scales' are"),
        ("mxfp4", _block, "scales 'w.scales' are"),
    ],
)
def test_graphs_that_do_not_fit_what_is_stored(tmp_path: Path, kind: str, change: Any, message: str) -> None:
    _write(tmp_path / "b", kind)
    edit_graph(tmp_path / "b", change)
    with pytest.raises(BundleError, match=message):
        Bundle.open(tmp_path / "b")


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("nvfp4", {"tensor_scale": None}, "the scales' own scale is 'w.tensor_scale'"),
        ("mxfp4", {"tensor_scale": "w.scales"}, "quantiz|scales' own scale"),
        ("fp8", {"number": "int"}, "quantization of 'w'"),
        ("fp8", {"number": "e5m2"}, "number is"),
        ("fp8", {"number": ["e4m3"]}, "number is"),
        ("fp8", {"tensor_scale": 3}, "tensor_scale is 3"),
        ("int3", {"bits": 4}, "quantization of 'w'"),
        ("nvfp4", {"bits": 8}, "bits is 8, expected 4"),
    ],
)
def test_manifests_that_do_not_fit_what_is_stored(
    tmp_path: Path, kind: str, change: dict[str, Any], message: str
) -> None:
    _write(tmp_path / "b", kind)
    edit_manifest(tmp_path / "b", lambda document: document["quantization"]["w"].update(change))
    with pytest.raises(BundleError, match=message):
        Bundle.open(tmp_path / "b")

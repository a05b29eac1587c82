"""Weights that were trained, with their outliers and odd sizes, through quantization, a bundle, and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import safetensors.numpy

from inferencex.convert.quantize import WeightInfo, method_named, parse_scheme, plan_quantization
from inferencex.formats.bundle import Bundle, BundleWriter, Manifest

pytestmark = pytest.mark.shared


def model_of(entries: dict[str, tuple[str, ...]], attributes: dict[str, dict[str, int]]) -> ir.Model:
    """Return a graph that dequantizes every weight, given the names of its parts."""
    initializers, nodes, outputs = [], [], []
    for index, (name, parts) in enumerate(entries.items()):
        values = [ir.Value(name=part) for part in parts]
        node = ir.node("DequantizeLinear", values, attributes={**attributes[name], "output_dtype": 1})
        node.outputs[0].name = f"y{index}"
        node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        initializers += values
        nodes.append(node)
        outputs.append(node.outputs[0])
    graph = ir.Graph([], outputs, nodes=nodes, initializers=initializers, opset_imports={"": 23}, name="weights")
    return ir.Model(graph, ir_version=11)


@pytest.mark.parametrize(
    ("scheme_name", "largest_error", "most_bits"),
    [("rtn-int4", 0.13, 4.6), ("rtn-int4-g128", 0.15, 4.5), ("rtn-int8", 0.012, 8.3)],
)
@pytest.mark.parametrize("model", ["stories260k", "babyllama-char105"])
def test_trained_weights(
    shared_data: Path, tmp_path: Path, model: str, scheme_name: str, largest_error: float, most_bits: float
) -> None:
    weights = safetensors.numpy.load_file(shared_data / model / "model.safetensors")
    linears = {name: weight for name, weight in weights.items() if "proj" in name}
    assert linears
    infos = [WeightInfo(name, weight.shape) for name, weight in linears.items()]
    plans = plan_quantization(infos, parse_scheme(scheme_name))
    parts: dict[str, tuple[str, ...]] = {}
    attributes: dict[str, dict[str, int]] = {}
    expected = {}
    with BundleWriter(tmp_path / "b", expected_bytes=sum(plan.stored_bytes(4) for plan in plans)) as writer:
        for plan in plans:
            assert plan.scheme is not None
            weight = linears[plan.name]
            result = method_named(plan.method).quantize(plan.name, weight, plan.scheme)
            assert result.relative_error < largest_error
            assert result.tensor.bits_per_weight < most_bits
            entry = writer.add_quantized(plan.name, result.tensor, method=plan.method)
            parts[plan.name] = (plan.name, entry.scales, *([entry.zero_points] if entry.zero_points else []))
            attributes[plan.name] = result.tensor.attributes
            expected[plan.name] = result.tensor.dequantize()
            assert np.linalg.norm(expected[plan.name] - weight) / np.linalg.norm(weight) < largest_error
        writer.write_graph(model_of(parts, attributes))
        writer.seal(Manifest(scheme=parse_scheme(scheme_name).to_json()))
        bundle = Bundle.open(writer.commit(), verify=True)
    assert set(bundle.manifest.quantization) == set(linears)
    for name, weight in expected.items():
        np.testing.assert_array_equal(bundle.quantized(name).dequantize(), weight)

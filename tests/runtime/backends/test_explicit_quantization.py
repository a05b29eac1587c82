"""Linears whose inputs the graph quantizes, on both backends, against what the graph says."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

pytest.importorskip("transformers", reason="needs the extra inferencex[convert]")

from inferencex.convert.quantize import TensorScheme, quantize_weight
from inferencex.convert.quantize.scheme import ActivationScheme
from inferencex.convert.stored_forms import StoredForms
from inferencex.formats.dialect.reference import quantize_rows
from inferencex.formats.dtypes import DataType
from inferencex.formats.errors import QuantizationError
from inferencex.formats.packing import PER_CHANNEL, QuantizedTensor
from inferencex.runtime.backends.base import StepBatch
from inferencex.runtime.backends.cpu.native import _cpu
from tests.runtime.backends.reference.steps import Model, compiled, compiled_cpu

FEATURES, CHANNELS, SCALE = 40, 12, 0.03
WEIGHTS = {
    "int8": TensorScheme("int8", PER_CHANNEL, True),
    "int8 groups": TensorScheme("int8", 16, True),
    "fp8": TensorScheme("fp8", PER_CHANNEL, True),
}
ACTIVATIONS = [ActivationScheme("int8"), ActivationScheme("int8", True), ActivationScheme("fp8"),
               ActivationScheme("fp8", True)]  # fmt: skip
TO = {"int8": DataType.INT8, "fp8": DataType.FLOAT8E4M3FN}


def _batch(tokens: int) -> StepBatch:
    return StepBatch(
        token_ids=np.arange(tokens, dtype=np.int32),
        positions=np.arange(tokens, dtype=np.int32),
        sequence_offsets=np.array([0, tokens], np.int32),
        context_lengths=np.array([tokens], np.int32),
        block_tables=np.arange(4, dtype=np.int32)[None],
        logit_rows=np.arange(tokens, dtype=np.int32),
        prompt_lengths=np.full(tokens, tokens, np.int32),
    )


def _fill(graph: ir.Graph, name: str, array: NDArray[Any]) -> None:
    value = graph.initializers[name]
    value.const_value = ir.Tensor(np.ascontiguousarray(array), name=name)
    value.type, value.shape = ir.TensorType(value.const_value.dtype), ir.Shape(array.shape)


def _model(
    weights: dict[str, QuantizedTensor], activation: ActivationScheme | None
) -> tuple[ir.Model, NDArray[np.float32]]:
    """Return a graph that sums linears which share their input, and that input for tokens 0 and on."""
    m = Model()
    x = m.embed(FEATURES)
    table = next(iter(m.graph.initializers.values())).const_value
    assert table is not None
    values = {}
    for name in weights:
        values[name] = ir.Value(name=name, shape=ir.Shape([CHANNELS, FEATURES]), type=ir.TensorType(ir.DataType.FLOAT))
        m.graph.initializers[name] = values[name]
    sums = [m.node("Gemm", x, value, shape=["tokens", CHANNELS], transB=1) for value in values.values()]
    y = sums[0]
    for other in sums[1:]:
        y = m.node("Add", y, other, shape=["tokens", CHANNELS])
    model = m.finish(y, CHANNELS)
    forms = StoredForms(model)
    for name, tensor in weights.items():
        weight = forms.dequantize(values[name], tensor)
        if activation is not None:
            forms.quantize_inputs(weight, activation, SCALE if activation.static else None)
        _fill(m.graph, name, tensor.values)
        _fill(m.graph, f"{name}.scales", tensor.scales)
    return model, table.numpy()


def _quantized(x: NDArray[np.float32], activation: ActivationScheme) -> NDArray[np.float64]:
    """Return what quantized inputs stand for."""
    if not activation.static:
        values, scales = quantize_rows(x, TO[activation.type])
        return values.astype(np.float64) * scales[:, None].astype(np.float64)
    scaled = x / np.float32(SCALE)
    if activation.type == "int8":
        return np.asarray(np.clip(np.rint(scaled), -128, 127).astype(np.float64) * np.float32(SCALE))
    rounded = np.clip(scaled, -448, 448).astype(TO["fp8"].numpy())
    return np.asarray(rounded.astype(np.float64) * np.float32(SCALE))


def _weight(kind: str, seed: int = 0) -> QuantizedTensor:
    weight = np.random.default_rng(seed).standard_normal((CHANNELS, FEATURES)).astype(np.float32)
    return quantize_weight("w", weight, WEIGHTS[kind]).tensor


@pytest.mark.parametrize("integer", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_what_the_graph_says_is_computed(kind: str, activation: ActivationScheme, integer: bool) -> None:
    tensor = _weight(kind)
    model, table = _model({"w": tensor}, activation)
    tokens = 7
    x = table[:tokens]
    expected = _quantized(x, activation) @ tensor.dequantize().astype(np.float64).T
    tolerance = {"rtol": 1e-5, "atol": 1e-5 * float(np.abs(expected).max())}
    np.testing.assert_allclose(compiled(model).step(_batch(tokens)), expected, **tolerance)
    for isa in _cpu.available_isas():
        with mock.patch.dict(os.environ, INFERENCEX_ISA=isa):
            executable = compiled_cpu(model, integer_activations=integer)
        assert not executable.lowered.fallbacks
        kinds = {instruction.kind for instruction in executable.lowered.instructions}
        on_integers = integer and kind == "int8" and activation.type == "int8"
        assert kinds >= ({"Quantize", "IntegerLinear"} if on_integers else {"FakeQuantize", "FloatLinear"})
        assert ("FakeQuantize" in kinds) != on_integers, "nothing that the graph quantizes stays as it was"
        np.testing.assert_allclose(executable.step(_batch(tokens)), expected, **tolerance)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_linears_share_the_quantized_form_of_their_input(activation: ActivationScheme) -> None:
    weights = {"a": _weight("int8", 1), "b": _weight("int8", 2)}
    model, table = _model(weights, activation)
    assert sum(node.op_type in ("QuantizeRows", "QuantizeLinear") for node in model.graph) == 1
    executable = compiled_cpu(model, integer_activations=True)
    kinds = [instruction.kind for instruction in executable.lowered.instructions]
    assert kinds.count("Quantize") + kinds.count("FakeQuantize") == 1
    total = sum(tensor.dequantize().astype(np.float64) for tensor in weights.values())
    expected = _quantized(table[:5], activation) @ np.asarray(total).T
    np.testing.assert_allclose(executable.step(_batch(5)), expected, rtol=1e-5, atol=1e-4)


def test_a_linear_with_and_one_without_integer_kernels_share_their_input() -> None:
    weights = {"a": _weight("int8", 1), "b": _weight("int8 groups", 2)}
    model, table = _model(weights, ActivationScheme("int8"))
    executable = compiled_cpu(model, integer_activations=True)
    kinds = [instruction.kind for instruction in executable.lowered.instructions]
    assert {"Quantize", "IntegerLinear", "FakeQuantize", "FloatLinear"} <= set(kinds)
    total = sum(tensor.dequantize().astype(np.float64) for tensor in weights.values())
    expected = _quantized(table[:5], ActivationScheme("int8")) @ np.asarray(total).T
    np.testing.assert_allclose(executable.step(_batch(5)), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("scale", [None, 0.0, float("nan"), float("inf")])
def test_static_activations_need_a_scale(scale: float | None) -> None:
    m = Model()
    weight = ir.Value(name="w", shape=ir.Shape([CHANNELS, FEATURES]), type=ir.TensorType(ir.DataType.FLOAT))
    m.graph.initializers["w"] = weight
    model = m.finish(m.node("Gemm", m.embed(FEATURES), weight, shape=["tokens", CHANNELS], transB=1), CHANNELS)
    forms = StoredForms(model)
    with pytest.raises(QuantizationError, match="static int8 activations need a scale from calibration"):
        forms.quantize_inputs(forms.dequantize(weight, _weight("int8")), ActivationScheme("int8", True), scale)

"""Activations that the graph quantizes, along with what computes them: the same bits, in fewer launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra inferencex[convert]")

from inferencex.convert.quantize import TensorScheme, quantize_weight
from inferencex.convert.quantize.scheme import ActivationScheme
from inferencex.convert.stored_forms import StoredForms
from inferencex.formats.dialect.names import DOMAIN
from inferencex.formats.graph import read_graph
from inferencex.formats.packing import PER_CHANNEL
from inferencex.runtime.backends.base import BackendOptions
from inferencex.runtime.backends.graph.static_values import StaticValues
from inferencex.runtime.backends.triton import TritonBackend
from inferencex.runtime.backends.triton.lowering import Program, lower_graph, rows
from inferencex.runtime.backends.triton.lowering.constants import Constants
from tests import triton_kernels
from tests.runtime.backends.reference.steps import VOCAB, Model
from tests.runtime.backends.triton.test_executable import prompts_batch, step_batch

WIDTH, CHANNELS, SCALE = 48, 12, 0.03
NODES = ("RMSNormalization", "LayerNormalization", "AddRMSNormalization", "AddLayerNormalization", "GatedActivation")
SCHEMES = [ActivationScheme(kind, static) for kind in ("int8", "fp8") for static in (False, True)]
TOKENS = torch.tensor([3, 0, 7, 7, 10, 1])


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each kernel was launched."""
    if triton_kernels.device() == "cuda":
        pytest.skip("launches are counted in the interpreter")
    from triton.runtime.interpreter import GridExecutor

    counts: Counter[str] = Counter()
    launch = GridExecutor.__call__

    def counted(self: Any, *arguments: Any, **options: Any) -> None:
        counts[self.fn.__name__] += 1
        launch(self, *arguments, **options)

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    yield counts


def make_graph(
    op_type: str, scheme: ActivationScheme, *, read_plainly: bool = False, other: ActivationScheme | None = None
) -> ir.Model:
    """Return a graph of a node, and two linears on what it computes, which they quantize.

    read_plainly: a linear of floats reads it, too
    other:        how a linear more quantizes it
    """
    m = Model()
    x, domain, attributes = m.embed(WIDTH), DOMAIN if op_type[0] in "AG" else "", {}
    if op_type == "GatedActivation":
        inputs = [m.embed(2 * WIDTH)]
        attributes = {"activation": "silu"}
    else:
        inputs = [x, *([m.embed(WIDTH)] if op_type.startswith("Add") else []), m.weight(WIDTH)]
        if "Layer" in op_type:
            inputs.append(m.weight(WIDTH))
        attributes = {"epsilon": 1e-5} | ({} if op_type.startswith("Add") else {"axis": -1})
    y = m.node(op_type, *inputs, shape=["tokens", WIDTH], domain=domain, **attributes)
    total = None
    if op_type.startswith("Add"):
        total = ir.Value(name="total", shape=ir.Shape(["tokens", WIDTH]), type=ir.TensorType(ir.DataType.FLOAT))
        node = y.producer()
        assert node is not None
        m.graph.remove(node)
        m.graph.append(
            ir.node(op_type, list(node.inputs), attributes, domain=domain, outputs=[ir.Value(
                name="y", shape=y.shape, type=y.type), total])
        )  # fmt: skip
        y = m.graph[-1].outputs[0]
    schemes = [scheme, scheme, *([] if other is None else [other]), *([None] if read_plainly else [])]
    weights = [
        ir.Value(name=f"linear{i}", shape=ir.Shape([CHANNELS, WIDTH]), type=ir.TensorType(ir.DataType.FLOAT))
        for i in range(len(schemes))
    ]
    for weight in weights:
        m.graph.initializers[str(weight.name)] = weight
    parts = [m.node("Gemm", y, weight, shape=["tokens", CHANNELS], transB=1) for weight in weights]
    if total is not None:
        parts.append(m.node("Gemm", total, m.weight(CHANNELS, WIDTH), shape=["tokens", CHANNELS], transB=1))
    result = parts[0]
    for part in parts[1:]:
        result = m.node("Add", result, part, shape=["tokens", CHANNELS])
    model = m.finish(result, CHANNELS)
    forms = StoredForms(model)
    for weight, how in zip(weights, schemes, strict=True):
        numbers = m.rng.standard_normal((CHANNELS, WIDTH)).astype(np.float32)
        if how is None:
            fill(m.graph, str(weight.name), numbers)
            continue
        tensor = quantize_weight("w", numbers, TensorScheme(how.type, PER_CHANNEL, True)).tensor
        forms.quantize_inputs(forms.dequantize(weight, tensor), how, SCALE if how.static else None)
        fill(m.graph, str(weight.name), tensor.values)
        fill(m.graph, f"{weight.name}.scales", tensor.scales)
    return model


def fill(graph: ir.Graph, name: str, array: Any) -> None:
    value = graph.initializers[name]
    value.const_value = ir.Tensor(np.ascontiguousarray(array), name=name)
    value.type, value.shape = ir.TensorType(value.const_value.dtype), ir.Shape(array.shape)


def lowered(model: ir.Model, device: str, dtype: torch.dtype) -> Program:
    graph = read_graph(ir.to_proto(model))

    def nothing(name: str) -> Any:
        raise AssertionError(f"{name} is a constant inside the graph")

    constants = Constants(StaticValues(graph, nothing), torch.device(device), dtype)
    return lower_graph(graph, constants, cast(Any, None), 64)


def run(program: Program, device: str) -> Tensor:
    inputs = {"token_ids": TOKENS.to(device), "positions": TOKENS.to(device), "logit_rows": torch.arange(6).to(device)}
    return program.run(inputs, cast(Any, None), program.logits).cpu()


def unfused(monkeypatch: pytest.MonkeyPatch, make: Any) -> Any:
    """Return what is made without anything quantized along."""
    with monkeypatch.context() as patch:
        patch.setattr(rows, "quantization_behind", lambda lowering, value: None)
        return make()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("op_type", NODES)
def test_the_same_bits_in_one_launch_less(
    device: str,
    op_type: str,
    scheme: ActivationScheme,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    launches: Counter[str],
) -> None:
    model = make_graph(op_type, scheme)
    expected = run(unfused(monkeypatch, lambda: lowered(model, device, dtype)), device)
    apart = Counter(launches)
    launches.clear()
    found = run(lowered(model, device, dtype), device)
    assert torch.isfinite(found).all() and torch.equal(found, expected)
    quantizer = "_quantize_fixed" if scheme.static else "_quantize_rows"
    assert apart[quantizer] == 1 and apart - launches == Counter({quantizer: 1}) and not launches - apart


@pytest.mark.parametrize("op_type", NODES)
@pytest.mark.parametrize("other", [None, ActivationScheme("fp8"), ActivationScheme("int8", True)], ids=str)
def test_what_else_reads_the_rows_gets_them(
    device: str, op_type: str, other: ActivationScheme | None, monkeypatch: pytest.MonkeyPatch, launches: Counter[str]
) -> None:
    model = make_graph(op_type, ActivationScheme("int8"), read_plainly=True, other=other)
    expected = run(unfused(monkeypatch, lambda: lowered(model, device, torch.float32)), device)
    apart = Counter(launches)
    launches.clear()
    found = run(lowered(model, device, torch.float32), device)
    assert torch.equal(found, expected)
    assert sum((apart - launches).values()) == 1 and not launches - apart


def test_what_the_head_reads_is_there(device: str) -> None:
    m = Model()
    x = m.node("RMSNormalization", m.embed(WIDTH), m.weight(WIDTH), shape=["tokens", WIDTH], axis=-1)
    x = m.node("Gather", x, m.rows, shape=["rows", WIDTH], axis=0)
    y = m.node("RMSNormalization", x, m.weight(WIDTH), shape=["rows", WIDTH], axis=-1)
    weight = ir.Value(name="head", shape=ir.Shape([VOCAB, WIDTH]), type=ir.TensorType(ir.DataType.FLOAT))
    m.graph.initializers["head"] = weight
    logits = m.node("Gemm", y, weight, shape=["rows", VOCAB], transB=1)
    m.graph.outputs.append(logits)
    model = ir.Model(m.graph, ir_version=11)
    forms = StoredForms(model)
    numbers = m.rng.standard_normal((VOCAB, WIDTH)).astype(np.float32)
    tensor = quantize_weight("w", numbers, TensorScheme("int8", PER_CHANNEL, True)).tensor
    forms.quantize_inputs(forms.dequantize(weight, tensor), ActivationScheme("int8"), None)
    fill(m.graph, "head", tensor.values)
    fill(m.graph, "head.scales", tensor.scales)
    program = lowered(model, device, torch.float32)
    assert program.hidden == y.name
    inputs = {"token_ids": TOKENS.to(device), "positions": TOKENS.to(device), "logit_rows": torch.arange(6).to(device)}
    hidden = program.run(inputs, cast(Any, None), y.name)
    assert hidden.shape == (6, WIDTH) and torch.isfinite(hidden).all()


@pytest.mark.parametrize("quantization", ["int8-dynamic", "fp8"])
@pytest.mark.parametrize("name", ["qwen2", "phi"])
def test_bundles(
    name: str, quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launches: Counter[str]
) -> None:
    """In a decoder of RMS norms, only what attention gives is quantized by a launch of its own."""
    from tests.architectures.comparison import write_bundle
    from tests.architectures.shrink import tiny_config
    from tests.architectures.zoo import tiny_model

    bundle = write_bundle(tiny_model(name), tiny_config(name), tmp_path, quantization=quantization)
    options = BackendOptions(num_blocks=24, block_size=4, activation_dtype="float32")
    batches = [prompts_batch(), step_batch([(5, 6), (1, 2), (3, 4)], [7, 8, 9])]
    apart = unfused(monkeypatch, lambda: TritonBackend().compile(bundle, options))
    expected = [apart.step(batch) for batch in batches]
    before = Counter(launches)
    launches.clear()
    executable = TritonBackend().compile(bundle, options)
    for batch, wanted in zip(batches, expected, strict=True):
        assert np.array_equal(executable.step(batch), wanted)
    layers = executable.facts.num_layers
    saved = before - launches
    assert set(saved) == {"_quantize_rows"} and not launches - before
    if name == "qwen2":
        assert before["_quantize_rows"] == 2 * 4 * layers and launches["_quantize_rows"] == 2 * layers

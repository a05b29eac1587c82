"""Quantized checkpoints become bundles that hold the same integers and compute what the integers stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from inferencex.convert import fidelity
from inferencex.convert.pipeline import ConvertOptions, convert
from inferencex.convert.quantize import parse_scheme
from inferencex.formats.bundle import Bundle
from tests.architectures import zoo
from tests.convert.source.packed import layouts
from tests.convert.source.packed.checkpoints import SIZES, float8_quantizer, integer_quantizer, write_checkpoint
from tests.smollm2 import Quiet

IDS = [3, 7, 200, 41, 5, 99, 100, 7, 8, 150, 2]


def run(source: Path, output: Path, scheme: str = "none", **options: Any) -> Bundle:
    """Convert, and open the result."""
    quantization = {key: options.pop(key) for key in ("lm_head", "embedding") if key in options}
    convert(ConvertOptions(str(source), output, parse_scheme(scheme, **quantization), **options), Quiet())
    return Bundle.open(output, verify=True)


def check_logits(model: torch.nn.Module, bundle: Bundle, limit: float = 1e-4) -> None:
    expected = zoo.reference_logits(model, IDS)
    found = fidelity.bundle_logits(bundle.path, IDS).numpy()
    assert np.abs(found - expected).max() <= limit


def check_integers(bundle: Bundle, seen: dict[str, layouts.Integers]) -> None:
    """Every quantized weight of the bundle is made of the checkpoint's integers, scales and zero points."""
    found = 0
    for name in bundle.manifest.quantization:
        tensor = bundle.quantized(name)
        integers = tensor.integers().astype(np.int64)
        zero_points = tensor.zero_point_integers()
        scales = tensor.float_scales().astype(np.float64)
        row = 0
        for part in bundle.manifest.made_of[name].parts:
            q = seen[part.parameter.removesuffix(".weight")]
            rows = slice(row, row + part.rows)
            row += part.rows
            signed = tensor.symmetric or tensor.bits == 8
            offset = 1 << (q.bits - 1) if signed else 0
            np.testing.assert_array_equal(integers[rows] + offset, q.values)
            expected_scales = q.scales[:, 0] if scales.ndim == 1 else q.scales
            np.testing.assert_array_equal(scales[rows], expected_scales)
            if zero_points is None:
                assert (q.zero_points == 1 << (q.bits - 1)).all()
            else:
                stored = zero_points.astype(np.int64)[rows] + offset
                np.testing.assert_array_equal(stored, q.zero_points[:, 0] if stored.ndim == 1 else q.zero_points)
            found += 1
    assert found == len(seen)


@pytest.mark.parametrize(("group_size", "tied", "bias"), [(32, True, False), (-1, False, True)])
def test_awq(tmp_path: Path, group_size: int, tied: bool, bias: bool) -> None:
    seen: dict[str, layouts.Integers] = {}
    quantize = integer_quantizer(layouts.awq, seen=seen, bits=4, group_size=group_size, symmetric=False)
    settings = layouts.config_of("awq", bits=4, group_size=group_size, version="gemm", zero_point=True)
    model = write_checkpoint(
        tmp_path / "source", settings, quantize, tie_word_embeddings=tied, attention_bias=bias, mlp_bias=bias
    )
    bundle = run(tmp_path / "source", tmp_path / "out")
    check_logits(model, bundle)
    check_integers(bundle, seen)
    source_config = (tmp_path / "source" / "config.json").read_bytes()
    assert (bundle.path / "config.json").read_bytes() == source_config
    assert len(bundle.manifest.quantization) == 4  # qkv, o, gate+up and down
    assert {entry.method for entry in bundle.manifest.quantization.values()} == {"awq"}


@pytest.mark.parametrize(
    ("bits", "group_size", "symmetric"), [(4, 32, True), (8, -1, False), (3, 32, True), (4, 40, False)]
)
def test_gptq(tmp_path: Path, bits: int, group_size: int, symmetric: bool) -> None:
    seen: dict[str, layouts.Integers] = {}
    quantize = integer_quantizer(
        lambda module, q: layouts.gptq(module, q, version=1),
        seen=seen,
        bits=bits,
        group_size=group_size,
        symmetric=symmetric,
    )
    settings = layouts.config_of("gptq", bits=bits, group_size=group_size, sym=symmetric, desc_act=False)
    model = write_checkpoint(tmp_path / "source", settings, quantize)
    bundle = run(tmp_path / "source", tmp_path / "out")
    check_logits(model, bundle)
    check_integers(bundle, seen)


def test_compressed_integers(tmp_path: Path) -> None:
    """The head is quantized too."""
    seen: dict[str, layouts.Integers] = {}
    quantize = integer_quantizer(
        lambda module, q: layouts.pack_quantized(module, q, symmetric=False, dtype=torch.bfloat16),
        seen=seen,
        bits=4,
        group_size=32,
        symmetric=False,
        scale_dtype=torch.bfloat16,
    )
    settings = layouts.compressed_config("pack-quantized", num_bits=4, symmetric=False, strategy="group", group_size=32)
    settings["ignore"] = []
    model = write_checkpoint(tmp_path / "source", settings, quantize, skip=("none",), tie_word_embeddings=False)
    bundle = run(tmp_path / "source", tmp_path / "out")
    check_logits(model, bundle)
    check_integers(bundle, seen)
    assert "lm_head.weight" in bundle.manifest.quantization


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
def test_fp8(tmp_path: Path, method: str) -> None:
    block = (48, 32)
    settings = layouts.config_of("fp8", activation_scheme="static", fmt="e4m3", weight_block_size=block)
    scale = "weight_scale_inv"
    if method == "compressed-tensors":
        settings = layouts.compressed_config("float-quantized", num_bits=8, type="float", strategy="channel")
        scale, block = "weight_scale", (1, 1 << 20)
    extra = {"model.layers.0.self_attn.q_proj.input_scale": torch.ones(1)}
    model = write_checkpoint(tmp_path / "source", settings, float8_quantizer(scale, block), extra=extra)
    bundle = run(tmp_path / "source", tmp_path / "out")
    check_logits(model, bundle)
    assert [entry.number for entry in bundle.manifest.quantization.values()] == ["e4m3"] * 4
    warnings = json.loads((bundle.path / "report.json").read_text())["warnings"]
    assert any("q_proj.input_scale" in text for text in warnings)


@pytest.mark.parametrize("shared", [True, False])
def test_gptq_in_activation_order(tmp_path: Path, shared: bool) -> None:
    """Channels of a group need not be neighbours; projections of one input agree on them, or are stored plain."""
    orders: dict[Any, NDArray[np.int64]] = {}

    def quantize(module: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], NDArray[np.float64]]:
        columns = weight.shape[1]
        key = (module.rpartition(".")[0] if shared else module, columns)
        rng = np.random.default_rng(len(orders))
        groups = orders.setdefault(key, rng.permutation(np.arange(columns) // 32))
        q = layouts.round_to_integers(weight, bits=4, group_size=32, symmetric=False, groups=groups)
        return layouts.gptq(module, q, version=1), q.weight()

    settings = layouts.config_of("gptq", bits=4, group_size=32, sym=False, desc_act=True)
    model = write_checkpoint(tmp_path / "source", settings, quantize)
    bundle = run(tmp_path / "source", tmp_path / "out")
    check_logits(model, bundle)
    gathers = [n for n in bundle.model.graph if n.op_type == "Gather" and "input_order" in str(n.inputs[1])]
    warnings = json.loads((bundle.path / "report.json").read_text())["warnings"]
    if shared:
        assert len(bundle.manifest.quantization) == len(gathers) == 4
        assert not any("different orders" in text for text in warnings)
        assert all(origin.computed_by for name, origin in bundle.manifest.made_of.items() if "down_proj" in name)
    else:
        assert len(bundle.manifest.quantization) == len(gathers) == 2  # o_proj and down_proj, which are not merged
        assert any("different orders" in text for text in warnings)


def test_gptqmodel_exceptions_by_module(tmp_path: Path) -> None:
    """Projections of different widths are merged in the wider one, without loss."""

    def quantize(module: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], NDArray[np.float64]]:
        wide = "v_proj" in module
        q = layouts.round_to_integers(weight, bits=8 if wide else 4, group_size=16 if wide else 32, symmetric=wide)
        return layouts.gptq(module, q, version=2), q.weight()

    settings = layouts.config_of("gptq", bits=4, group_size=32, sym=False, checkpoint_format="gptq_v2")
    settings["dynamic"] = {r"+:.*v_proj": {"bits": 8, "group_size": 16, "sym": True}, r"-:.*\.lm_head": {}}
    model = write_checkpoint(tmp_path / "source", settings, quantize)
    bundle = run(tmp_path / "source", tmp_path / "out")
    check_logits(model, bundle)
    merged = next(entry for name, entry in bundle.manifest.quantization.items() if "v_proj" in name)
    assert (merged.bits, merged.group_size, merged.symmetric) == (8, 16, False)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_are_stacked(tmp_path: Path, name: str) -> None:
    """Experts that are stored one by one become one tensor of integers."""
    model = zoo.tiny_model(name, **SIZES)
    tensors = {}
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if ".experts." not in key:
                tensors[key] = value.clone()
                continue
            for expert, matrix in enumerate(value):
                halves = matrix.chunk(2) if key.endswith("gate_up_proj") else (matrix,)
                names = {"qwen3_moe": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}[name]
                for half, part in zip(halves, names[:2] if len(halves) == 2 else names[2:], strict=True):
                    q = layouts.round_to_integers(half, bits=4, group_size=16, symmetric=False)
                    half.copy_(torch.from_numpy(q.weight()))
                    module = f"{key.rpartition('.')[0]}.{expert}.{part}"
                    if name == "mixtral":
                        module = module.replace(".mlp.", ".block_sparse_moe.")
                    tensors |= layouts.gptq(module, q, version=1)
    if name == "mixtral":
        tensors = {key.replace(".mlp.gate.", ".block_sparse_moe.gate."): value for key, value in tensors.items()}
    source = tmp_path / "source"
    source.mkdir()
    save_file({key: value.contiguous() for key, value in tensors.items()}, source / "model.safetensors")
    settings = layouts.config_of("gptq", bits=4, group_size=16, sym=False)
    (source / "config.json").write_text(json.dumps({**model.config.to_dict(), "quantization_config": settings}))
    bundle = run(source, tmp_path / "out")
    check_logits(model, bundle)
    stacked = [entry for entry in bundle.manifest.quantization.values() if len(entry.shape) == 3]
    assert len(stacked) == 2 and {entry.bits for entry in stacked} == {4}


def test_plain_and_packed_projections_are_not_mixed_up(tmp_path: Path) -> None:
    """One projection that is plain makes the merged one plain, and the report says so."""
    quantize = integer_quantizer(layouts.awq, bits=4, group_size=32, symmetric=False)
    settings = layouts.config_of("awq", bits=4, group_size=32, modules_to_not_convert=["k_proj"])
    model = write_checkpoint(tmp_path / "source", settings, quantize, skip=("lm_head", "k_proj"))
    bundle = run(tmp_path / "source", tmp_path / "out")
    check_logits(model, bundle)
    assert len(bundle.manifest.quantization) == 3
    warnings = json.loads((bundle.path / "report.json").read_text())["warnings"]
    assert any("some of its rows are stored plain" in text and "q_proj" in text for text in warnings)


def test_a_transposed_weight_is_stored_plain(tmp_path: Path) -> None:
    """GPT-2 has its weights the other way round, so the packed rows are input channels."""
    model = zoo.tiny_model("gpt2")
    tensors = {key: value.clone() for key, value in model.state_dict().items() if key != "lm_head.weight"}
    with torch.no_grad():
        for module_name, module in model.named_modules():
            if module_name.endswith("c_fc"):
                q = layouts.round_to_integers(module.weight, bits=8, group_size=-1, symmetric=True)
                module.weight.copy_(torch.from_numpy(q.weight()))
                del tensors[f"{module_name}.weight"]
                tensors |= layouts.int_quantized(module_name, q, symmetric=True, dtype=torch.float32)
    source = tmp_path / "source"
    source.mkdir()
    save_file({key: value.contiguous() for key, value in tensors.items()}, source / "model.safetensors")
    settings = layouts.compressed_config("int-quantized", num_bits=8, strategy="channel")
    (source / "config.json").write_text(json.dumps({**model.config.to_dict(), "quantization_config": settings}))
    bundle = run(source, tmp_path / "out")
    check_logits(model, bundle)
    warnings = json.loads((bundle.path / "report.json").read_text())["warnings"]
    assert any("transposed" in text and "c_fc" in text for text in warnings)


@pytest.mark.parametrize("scheme", ["none", "rtn-int8"])
def test_dequantize(tmp_path: Path, scheme: str) -> None:
    quantize = integer_quantizer(layouts.awq, bits=4, group_size=32, symmetric=False)
    settings = layouts.config_of("awq", bits=4, group_size=32)
    model = write_checkpoint(tmp_path / "source", settings, quantize)
    bundle = run(tmp_path / "source", tmp_path / "out", scheme, dequantize=True)
    methods = {entry.method for entry in bundle.manifest.quantization.values()}
    assert methods == (set() if scheme == "none" else {"rtn"})
    check_logits(model, bundle, 1e-4 if scheme == "none" else 0.2)


def test_the_head_beside_packed_linears_can_be_quantized(tmp_path: Path) -> None:
    quantize = integer_quantizer(layouts.awq, bits=4, group_size=32, symmetric=False)
    write_checkpoint(tmp_path / "source", layouts.config_of("awq", bits=4, group_size=32), quantize)
    bundle = run(tmp_path / "source", tmp_path / "out", lm_head="int8")
    assert sorted({entry.method for entry in bundle.manifest.quantization.values()}) == ["awq", "rtn"]


def test_biases_of_zeros_that_the_model_has_no_place_for(tmp_path: Path) -> None:
    quantize = integer_quantizer(lambda m, q: layouts.gptq(m, q, version=1), bits=4, group_size=32, symmetric=True)
    settings = layouts.config_of("gptq", bits=4, group_size=32, sym=True)
    zeros = {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}
    model = write_checkpoint(tmp_path / "source", settings, quantize, extra=zeros)
    check_logits(model, run(tmp_path / "source", tmp_path / "out"))


def test_nvfp4(tmp_path: Path) -> None:
    """FP4 numbers, their FP8 scales and the factor of the tensor are stored as they are."""
    codes: dict[str, torch.Tensor] = {}

    def quantize(module: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], NDArray[np.float64]]:
        table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        rows, columns = weight.shape
        factor = torch.tensor(1024.0)  # one for all: merged projections share it, as other runtimes want it too
        blocks = weight.detach().reshape(rows, columns // 16, 16)
        scales = (blocks.abs().amax(-1) / 6 * factor).to(torch.float8_e4m3fn)
        spread = scales.float()[..., None] / factor
        index = ((blocks / spread).abs()[..., None] - table).abs().argmin(-1)
        code = (index + 8 * (blocks < 0)).reshape(rows, columns).to(torch.uint8)
        codes[module] = code
        value = (table[index] * blocks.sign() * spread).reshape(rows, columns).double().numpy()
        stored = {
            f"{module}.weight_packed": code[:, 0::2] | (code[:, 1::2] << 4),
            f"{module}.weight_scale": scales,
            f"{module}.weight_global_scale": factor.reshape(1),
        }
        return stored, value

    settings = layouts.compressed_config(
        "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
    )
    model = write_checkpoint(tmp_path / "source", settings, quantize)
    bundle = run(tmp_path / "source", tmp_path / "out")
    check_logits(model, bundle)
    for name, entry in bundle.manifest.quantization.items():
        assert entry.number == "e2m1"
        expected = [codes[part.parameter.removesuffix(".weight")] for part in bundle.manifest.made_of[name].parts]
        np.testing.assert_array_equal(bundle.quantized(name).integers(), torch.cat(expected).numpy())

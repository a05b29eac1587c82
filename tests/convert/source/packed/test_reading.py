"""Every layout of quantized weights against its description: numbers as they are, and what they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import LlamaConfig

from inferencex.convert.source.open import open_checkpoint
from inferencex.convert.source.packed.base import PackedHandle
from inferencex.formats.packing import QuantizedTensor
from tests.convert.source.packed import layouts
from tests.convert.source.packed.checkpoints import write_config

MODULE = "model.layers.0.mlp.up_proj"


def opened(folder: Path, settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> PackedHandle:
    """Store the tensors of one module, and return what is read of them."""
    write_config(folder, LlamaConfig().to_dict(), settings)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.packed == settings["quant_method"]
    assert not hasattr(checkpoint.config, "quantization_config")
    handle = checkpoint.tensors[f"{MODULE}.weight"]
    assert isinstance(handle, PackedHandle)
    return handle


def check(handle: PackedHandle, expected: NDArray[np.float64]) -> QuantizedTensor:
    """The tensor stands for `expected`, whole, by rows, and in the order of its input channels."""
    assert handle.shape == expected.shape
    np.testing.assert_allclose(handle.load().numpy(), expected, rtol=2e-7, atol=0)
    np.testing.assert_array_equal(handle.rows(5, 38), handle.load()[5:38])
    np.testing.assert_array_equal(handle.rows(33, 34), handle.load()[33:34])
    assert handle.rows(4, 4).shape == (0, expected.shape[1])
    tensor = handle.packed()
    order = handle.input_order()
    columns = np.arange(expected.shape[1]) if order is None else order
    np.testing.assert_allclose(tensor.dequantize(), expected[:, columns], rtol=2e-7, atol=0)
    return tensor


def check_integers(handle: PackedHandle, q: layouts.Integers) -> None:
    """The integers, scales and zero points are the checkpoint's."""
    tensor = check(handle, q.weight())
    offset = 1 << (q.bits - 1) if tensor.symmetric or tensor.bits == 8 else 0
    order = handle.input_order()
    columns = np.arange(q.values.shape[1]) if order is None else order
    np.testing.assert_array_equal(tensor.integers().astype(np.int64) + offset, q.values[:, columns])
    np.testing.assert_array_equal(tensor.float_scales().reshape(q.scales.shape).astype(np.float64), q.scales)
    zero_points = tensor.zero_point_integers()
    if zero_points is None:
        assert (q.zero_points == 1 << (q.bits - 1)).all()
    else:
        np.testing.assert_array_equal(zero_points.astype(np.int64).reshape(q.scales.shape) + offset, q.zero_points)


def weight(rows: int = 64, columns: int = 96) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group_size", [-1, 32, 48])
def test_awq(tmp_path: Path, group_size: int, dtype: torch.dtype) -> None:
    q = layouts.round_to_integers(weight(), bits=4, group_size=group_size, symmetric=False, scale_dtype=dtype)
    settings = layouts.config_of("awq", bits=4, group_size=group_size, version="GEMM", zero_point=True)
    check_integers(opened(tmp_path, settings, layouts.awq(MODULE, q, dtype)), q)


@pytest.mark.parametrize("order", ["natural", "permuted"])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [-1, 32, 64])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(tmp_path: Path, version: int, symmetric: bool, bits: int, group_size: int, order: str) -> None:
    if version == 1 and bits == 3 and not symmetric:
        pytest.skip("refused: see test_refusals")
    groups = np.arange(96) // (96 if group_size == -1 else group_size)
    if order == "permuted":
        groups = np.random.default_rng(0).permutation(groups)
    q = layouts.round_to_integers(weight(), bits=bits, group_size=group_size, symmetric=symmetric, groups=groups)
    settings = layouts.config_of(
        "gptq",
        bits=bits,
        group_size=group_size,
        sym=symmetric,
        desc_act=order == "permuted",
        checkpoint_format={1: "gptq", 2: "gptq_v2"}[version],
    )
    handle = opened(tmp_path, settings, layouts.gptq(MODULE, q, version=version))
    check_integers(handle, q)
    assert (handle.input_order() is None) == (order == "natural" or group_size == -1)


def test_gptq_without_g_idx(tmp_path: Path) -> None:
    q = layouts.round_to_integers(weight(), bits=4, group_size=32, symmetric=True)
    tensors = layouts.gptq(MODULE, q, version=1)
    del tensors[f"{MODULE}.g_idx"]
    check_integers(opened(tmp_path, layouts.config_of("gptq", bits=4, group_size=32, sym=True), tensors), q)


@pytest.mark.parametrize("stored", [0b011, 0b111])
def test_gptq_of_three_bits_packed_field_by_field_or_word_by_word(tmp_path: Path, stored: int) -> None:
    """Symmetric zero points are 4; programs differ in what they store for those that lie in two words."""
    q = layouts.round_to_integers(weight(), bits=3, group_size=32, symmetric=True)
    tensors = layouts.gptq(MODULE, q, version=1)
    fields = np.full(q.zero_points.T.shape, 3, dtype=np.int64)
    fields[:, 10::32] = stored  # lies in bits 30 to 32 of a period
    tensors[f"{MODULE}.qzeros"] = layouts.packed_along(fields, 3, axis=1)
    check_integers(opened(tmp_path, layouts.config_of("gptq", bits=3, group_size=32, sym=True), tensors), q)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [-1, 32, 40])
@pytest.mark.parametrize(
    ("format", "bits"),
    [
        ("pack-quantized", 2),
        ("pack-quantized", 3),
        ("pack-quantized", 4),
        ("pack-quantized", 8),
        ("int-quantized", 8),
        ("int-quantized", 4),
        ("naive-quantized", 8),
    ],
)
def test_compressed_integers(
    tmp_path: Path, format: str, bits: int, group_size: int, symmetric: bool, dtype: torch.dtype
) -> None:
    q = layouts.round_to_integers(
        weight(66, 100), bits=bits, group_size=group_size, symmetric=symmetric, scale_dtype=dtype
    )
    write = layouts.pack_quantized if format == "pack-quantized" else layouts.int_quantized
    strategy = {"strategy": "channel"} if group_size == -1 else {"strategy": "group", "group_size": group_size}
    settings = layouts.compressed_config(format, num_bits=bits, symmetric=symmetric, **strategy)
    check_integers(opened(tmp_path, settings, write(MODULE, q, symmetric=symmetric, dtype=dtype)), q)


def test_compressed_integers_in_activation_order(tmp_path: Path) -> None:
    groups = np.random.default_rng(1).permutation(np.arange(96) // 32)
    q = layouts.round_to_integers(weight(), bits=4, group_size=32, symmetric=True, groups=groups)
    settings = layouts.compressed_config(
        "pack-quantized", num_bits=4, strategy="group", group_size=32, actorder="group"
    )
    tensors = layouts.pack_quantized(MODULE, q, symmetric=True, dtype=torch.float16, g_idx=True)
    handle = opened(tmp_path, settings, tensors)
    assert handle.input_order() is not None
    check_integers(handle, q)


def test_compressed_integers_with_one_scale(tmp_path: Path) -> None:
    w = weight()
    q = layouts.round_to_integers(w.reshape(1, -1), bits=8, group_size=-1, symmetric=True)
    tensors = {
        f"{MODULE}.weight": torch.from_numpy((q.values - 128).astype(np.int8)).reshape(w.shape),
        f"{MODULE}.weight_scale": torch.from_numpy(q.scales).reshape(1).float(),
        f"{MODULE}.weight_zero_point": torch.zeros(1, dtype=torch.int8),
    }
    settings = layouts.compressed_config("int-quantized", num_bits=8, strategy="tensor")
    tensor = check(opened(tmp_path, settings, tensors), q.weight().reshape(w.shape))
    assert tensor.symmetric


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("strategy", "block"),
    [("tensor", (66, 100)), ("channel", (1, 100)), ("group", (1, 32)), ("block", (48, 32)), ("block", (128, 128))],
)
def test_compressed_floats(tmp_path: Path, strategy: str, block: tuple[int, int], dtype: torch.dtype) -> None:
    more: dict[str, Any] = {"group": {"group_size": 32}, "block": {"block_structure": list(block)}}.get(strategy, {})
    settings = layouts.compressed_config("float-quantized", num_bits=8, type="float", strategy=strategy, **more)
    q = layouts.round_to_float8(weight(66, 100), block, dtype)
    scales = q.scales.reshape(1) if strategy == "tensor" else q.scales
    tensors = {f"{MODULE}.weight": q.values, f"{MODULE}.weight_scale": scales}
    tensor = check(opened(tmp_path, settings, tensors), q.weight())
    np.testing.assert_array_equal(tensor.values.view(np.uint8), q.values.view(torch.uint8).numpy())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e8m0fnu])
@pytest.mark.parametrize("block", [(32, 32), (40, 48), (128, 128), None])
def test_fp8(tmp_path: Path, block: tuple[int, int] | None, dtype: torch.dtype) -> None:
    settings = layouts.config_of("fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=block)
    q = layouts.round_to_float8(weight(66, 100), block or (66, 100), dtype)
    tensors = {
        f"{MODULE}.weight": q.values,
        f"{MODULE}.weight_scale_inv": q.scales if block else q.scales.reshape(()),
        "model.norm.weight": torch.ones(4),
    }
    tensor = check(opened(tmp_path, settings, tensors), q.weight())
    np.testing.assert_array_equal(tensor.values.view(np.uint8), q.values.view(torch.uint8).numpy())


def test_fp8_with_a_scale_for_the_tensor(tmp_path: Path) -> None:
    """As AutoFP8 stores it: another name, no blocks, static scales of activations and of the KV cache."""
    q = layouts.round_to_float8(weight(66, 100), (66, 100))
    tensors = {
        f"{MODULE}.weight": q.values,
        f"{MODULE}.weight_scale": q.scales.reshape(()),
        f"{MODULE}.input_scale": torch.ones(()),
        "model.layers.0.self_attn.kv_scale": torch.ones(()),
    }
    settings = layouts.config_of("fp8", activation_scheme="static", ignored_layers=["lm_head"])
    check(opened(tmp_path, settings, tensors), q.weight())


def test_scales_are_float16_only_where_nothing_is_lost(tmp_path: Path) -> None:
    q = layouts.round_to_integers(weight() * 1e-4, bits=4, group_size=32, symmetric=True, scale_dtype=torch.float16)
    settings = layouts.config_of("awq", bits=4, group_size=32)
    tensor = opened(tmp_path, settings, layouts.awq(MODULE, q)).packed()
    assert tensor.scales.dtype == np.float32  # below the smallest normal number of float16
    np.testing.assert_array_equal(tensor.scales.astype(np.float64), q.scales)

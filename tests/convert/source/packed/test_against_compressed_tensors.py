"""What compressed-tensors packs and unpacks is read as it means it, where the package is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from inferencex.convert.source.open import open_checkpoint
from tests.convert.source.packed import layouts
from tests.convert.source.packed.checkpoints import write_config

compressors = pytest.importorskip("compressed_tensors.compressors")

MODULE = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("format", "weights"),
    [
        ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
        ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
        ("pack-quantized", {"num_bits": 3, "strategy": "group", "group_size": 32}),
        ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 32}),
        ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 48]}),
        ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    ],
)
def test_reads_what_it_writes(tmp_path: Path, format: str, weights: dict[str, Any], symmetric: bool) -> None:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    if not symmetric and weights.get("type") == "float":
        pytest.skip("floats are symmetric")
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights, symmetric=symmetric),
        input_activations=None,
    )
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(66, 96, generator=generator)
    shape = {"channel": (66, 1), "tensor": (1,), "block": (3, 2)}.get(
        weights["strategy"], (66, 96 // weights.get("group_size", 96))
    )
    bits = weights["num_bits"]
    top = {3: 4, 4: 8, 8: 448 if weights.get("type") else 128}[bits]
    state: dict[str, torch.Tensor] = {"weight": weight, "weight_scale": torch.full(shape, 3.0 / top)}
    state["weight_scale"] *= 1 + 0.3 * torch.rand(shape, generator=generator)
    if not symmetric:
        half = 1 << (bits - 1)
        state["weight_zero_point"] = torch.randint(-half, half, shape, generator=generator).to(torch.int8)
    if format.startswith("nvfp4"):
        state["weight_global_scale"] = torch.tensor([100.0])
        state["weight_scale"] = (state["weight_scale"] * 100).to(torch.float8_e4m3fn).float()
    compressor = compressors.BaseCompressor.get_value_from_registry(format)
    stored = compressor.compress(state, scheme)
    meant = compressor.decompress(dict(stored), scheme)["weight"].to(torch.float32).numpy()
    write_config(tmp_path, LlamaConfig().to_dict(), layouts.compressed_config(format, symmetric=symmetric, **weights))
    tensors = {f"{MODULE}.{name}": value.contiguous() for name, value in stored.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    found = open_checkpoint(str(tmp_path)).tensors[f"{MODULE}.weight"].load().numpy()
    assert np.abs(meant).max() > 1
    # NVFP4 is unpacked to bfloat16 there.
    np.testing.assert_allclose(found, meant, rtol=4e-3 if format.startswith("nvfp4") else 1e-6)

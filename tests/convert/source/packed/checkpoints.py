"""Tiny quantized checkpoints, and the models that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from tests.architectures import zoo
from tests.convert.source.packed import layouts

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 1,
}

Quantize = Callable[[str, torch.Tensor], tuple[dict[str, torch.Tensor], NDArray[np.float64]]]


def write_checkpoint(
    folder: Path,
    settings: dict[str, Any],
    quantize: Quantize,
    *,
    name: str = "llama",
    skip: tuple[str, ...] = ("lm_head",),
    extra: dict[str, torch.Tensor] | None = None,
    **overrides: Any,
) -> torch.nn.Module:
    """Write a tiny model with its linear layers quantized, and return it with what the quantized weights stand for."""
    model = zoo.tiny_model(name, **{**SIZES, **overrides})
    tensors = {k: v.detach().clone() for k, v in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    with torch.no_grad():
        for module_name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and not module_name.endswith(skip):
                stored, weight = quantize(module_name, module.weight)
                module.weight.copy_(torch.from_numpy(weight))
                del tensors[f"{module_name}.weight"]
                tensors |= stored
    folder.mkdir()
    save_file({k: v.contiguous() for k, v in {**tensors, **(extra or {})}.items()}, folder / "model.safetensors")
    write_config(folder, model.config.to_dict(), settings)
    return model


def write_config(folder: Path, config: dict[str, Any], settings: dict[str, Any] | None) -> None:
    """Write config.json of a quantized model."""
    more = {} if settings is None else {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps({**config, **more}, default=str))


def integer_quantizer(
    write: Callable[..., dict[str, torch.Tensor]], *, seen: dict[str, layouts.Integers] | None = None, **how: Any
) -> Quantize:
    """Quantize by `layouts.round_to_integers(**how)` and store by `write(module, integers)`."""

    def quantize(module: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], NDArray[np.float64]]:
        q = layouts.round_to_integers(weight, **how)
        if seen is not None:
            seen[module] = q
        return write(module, q), q.weight()

    return quantize


def float8_quantizer(scale_name: str, block: tuple[int, int], dtype: torch.dtype = torch.float32) -> Quantize:
    def quantize(module: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], NDArray[np.float64]]:
        rows, columns = weight.shape
        q = layouts.round_to_float8(weight, (min(block[0], rows), min(block[1], columns)), dtype)
        scales = q.scales.reshape(()) if block == (1 << 20, 1 << 20) else q.scales
        return {f"{module}.weight": q.values, f"{module}.{scale_name}": scales}, q.weight()

    return quantize

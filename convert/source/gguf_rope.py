"""RoPE scaling of GGUF files, which transformers' reader leaves out.

Dropping it gives a model that is right for short prompts and wrong past the original context, so what cannot be
carried over is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig

from inferencex.convert.source.gguf_file import GgufFile
from inferencex.formats.errors import SourceError

FACTOR_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def apply_rope_scaling(config: PreTrainedConfig, parts: Sequence[GgufFile]) -> None:
    """Set `config.rope_parameters` from `ARCH.rope.scaling.*` and from a stored table of frequency factors.

    Raises SourceError for a scaling that has no known equivalent in transformers.
    """
    first = parts[0]
    prefix = f"{first.metadata['general.architecture']}.rope.scaling."
    settings = {key.removeprefix(prefix): value for key, value in first.metadata.items() if key.startswith(prefix)}
    kind = settings.pop("type", "none")
    factor = settings.pop("factor", None)
    original = settings.pop("original_context_length", None)
    scaling: dict[str, object] | None = None
    if kind == "linear" and isinstance(factor, float):
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn" and isinstance(factor, float):
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        for key, target in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if (value := settings.pop(key, None)) is not None:
                scaling[target] = value
        if original is None:
            raise SourceError(f"{first.path}: {prefix}original_context_length is missing, and YaRN needs it")
    elif kind != "none":
        raise SourceError(f"{first.path}: RoPE scaling {kind!r} of a GGUF file is not supported; use the original")
    # Set while the model was fine-tuned; it changes nothing at inference.
    settings.pop("finetuned", None)
    if scaling is not None and settings:
        raise SourceError(f"{first.path}: these RoPE settings are not understood: {', '.join(sorted(settings))}")
    for name in FACTOR_TENSORS:
        handle = next((part.tensors[name] for part in parts if name in part.tensors), None)
        if handle is None:
            continue
        if name != "rope_freqs.weight" or scaling is not None:
            raise SourceError(f"{handle.path}: tensor {name!r} (per-frequency RoPE factors) is not supported here")
        scaling = _llama3_scaling(config, handle.load(), f"{handle.path}: tensor {name!r}")
    if scaling is not None:
        _set_scaling(config, scaling, str(first.path))
    _check_rotated_width(config, first)


def _set_scaling(config: PreTrainedConfig, scaling: dict[str, object], where: str) -> None:
    current = getattr(config, "rope_parameters", None)
    if not isinstance(current, dict):
        raise SourceError(f"{where}: scales RoPE, but {type(config).__name__} has no rope_parameters")
    if "full_attention" in current:
        # Where layer types have settings of their own, GGUF scales the layers that see the whole context.
        scaled = {**(current["full_attention"] or {}), **scaling}
        config.rope_parameters = {**current, "full_attention": scaled}
    else:
        config.rope_parameters = {**current, **scaling}


def _check_rotated_width(config: PreTrainedConfig, first: GgufFile) -> None:
    """Refuse a model that rotates another part of each head than its configuration says."""
    rotated = first.metadata.get(f"{first.metadata['general.architecture']}.rope.dimension_count")
    rope = getattr(config, "rope_parameters", None)
    if rotated is None or not isinstance(rope, dict) or "rope_theta" not in rope:
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    partial = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    if rotated != int(head_dim * partial):
        raise SourceError(
            f"{first.path}: rotates {rotated} of {head_dim} values of each head, but transformers' configuration of it "
            f"rotates {int(head_dim * partial)}; use the Hugging Face checkpoint of the model"
        )


def _llama3_scaling(config: PreTrainedConfig, factors: torch.Tensor, where: str) -> dict[str, object] | None:
    """Find the Llama 3 scaling whose frequency divisors are `factors`, float32 `[head_dim / 2]`.

    GGUF stores the divisors but not the parameters they came from. Published models use these parameters; the
    divisors are computed again and compared, so a wrong guess is refused, never used.
    """
    if bool((factors == 1).all()):
        return None
    theta = config.rope_parameters["rope_theta"]
    dim = 2 * factors.numel()
    frequency = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    low, high, original = 1.0, 4.0, 8192
    factor = round(float(factors.max()), 4)
    wavelength = 2 * math.pi / frequency
    smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not torch.allclose(expected.float(), factors.float(), rtol=1e-4):
        raise SourceError(f"{where} holds RoPE factors that follow no known rule; use the original checkpoint")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }

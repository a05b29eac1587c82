"""Tiny random models of every architecture that `transformers` lists for causal language modelling."""

from __future__ import annotations

import copy
import math
import zlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from tests.architectures.families import FAMILIES, Family
from tests.architectures.overrides import OVERRIDES
from tests.architectures.shrink import tiny_config

__all__ = ["DECODER", "FAMILIES", "Family", "build", "kind", "names", "reference_logits", "tiny_config", "tiny_model"]

DECODER = "decoder"

# What neither the configuration nor the mappings of `transformers` say.
NOT_DECODERS = {
    "cpmant": "not causal (every token attends to the whole prompt)",
    "xlnet": "not causal (permutation language model)",
    "gemma4_assistant": "draft model (needs the hidden states and keys of the model it drafts for)",
    "gemma4_unified_assistant": "draft model (needs the hidden states and keys of the model it drafts for)",
}


def names() -> list[str]:
    """Return every model type that `transformers` maps to a causal language model class."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def kind(name: str) -> str:
    """Return `DECODER` for decoder-only text architectures, else the reason why `name` is something else."""
    if name in NOT_DECODERS:
        return NOT_DECODERS[name]
    if name in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return "encoder (masked language model)"
    default = CONFIG_MAPPING[name](**OVERRIDES.get(name, {}).get("default_from", {}))
    if default.is_encoder_decoder:
        return "encoder-decoder"
    if hasattr(default, "decoder_layers"):
        return "decoder half of an encoder-decoder"
    if hasattr(default, "is_decoder") and hasattr(default, "add_cross_attention"):
        return "encoder with a decoder option"
    text = getattr(default, "text_config", None)
    if text is not None and text.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return f"multimodal wrapper (its text part is {text.model_type})"
    towers = sorted(key for key in default.sub_configs if key in ("vision_config", "audio_config"))
    if text is None and towers:
        return f"multimodal ({', '.join(tower.removesuffix('_config') for tower in towers)} towers in one model)"
    return DECODER


def build(config: PretrainedConfig, seed: int) -> nn.Module:
    """Return a float32 model of `config` in evaluation mode whose every parameter and stored buffer matters."""
    torch.manual_seed(seed)
    model: nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed)
    stored = {tensor.data_ptr() for tensor in model.state_dict().values()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _randomize(name, parameter, generator)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):  # a router's fixed table from token to experts
                buffer.copy_(torch.randint(config.n_routed_experts, buffer.shape, generator=generator))
            # Stored vectors are learned (a router's correction bias); stored matrices are computed (decay tables).
            if buffer.data_ptr() in stored and buffer.is_floating_point() and buffer.dim() == 1:
                buffer.add_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model.eval()


def _randomize(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    noise = torch.randn(parameter.shape, generator=generator)
    if name.endswith("A_log"):  # slow decay, so that a recurrent state remembers the whole test sequence
        parameter.copy_(0.5 * noise - 3.0)
    elif parameter.dim() >= 2:
        parameter.copy_(noise / math.sqrt(min(parameter.shape[-2:])))
    else:
        value = torch.nan_to_num(parameter)
        scale = value.abs().mean().item() or 1.0
        parameter.copy_(value + 0.2 * scale * noise)


def tiny_model(name: str, **overrides: Any) -> nn.Module:
    """Return a seeded tiny model of architecture `name`; `overrides` are fields of its configuration."""
    return build(tiny_config(name, **overrides), zlib.crc32(name.encode()))


def reference_logits(model: nn.Module, token_ids: list[int]) -> NDArray[np.float32]:
    """Return the logits float32 `[T, vocab]` of one sequence computed alone, at once, without a cache.

    A copy of the model runs: RoPE variants that depend on the length remember the longest sequence they saw.
    """
    with torch.no_grad():
        output = copy.deepcopy(model)(input_ids=torch.tensor([token_ids]), use_cache=False)
    logits: NDArray[np.float32] = output.logits[0].float().numpy()
    return logits

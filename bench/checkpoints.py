"""The common origin of all engines' models: a bfloat16 checkpoint in the Hugging Face layout, and token ids.

Every engine's model is made from this one folder, so all of them run the same weights on the same ids.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from bench.models import Model
from inferencex.convert.source.mapping import resolve_parameters
from inferencex.convert.source.open import open_checkpoint
from inferencex.recipes.windows import builtin_text

TOKEN_IDS = "token_ids.json"
_SEED = 0
_build: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
_TOKENIZER_OF = "smollm2-135m-instruct"
_STD = 0.02
_NUM_IDS = 8 * 2048 + 4096
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def make_checkpoint(model: Model, folder: Path) -> None:
    """Write config, weights, tokenizer and `TOKEN_IDS` to `folder`, the same every time."""
    folder.mkdir(parents=True)
    origin = open_checkpoint(_TOKENIZER_OF)
    for name, file in origin.files.items():
        if name in _TOKENIZER_FILES:
            shutil.copyfile(file, folder / name)
    if model.alias is None:
        config, tensors = _random(model)
    else:
        config, tensors = _converted(model.alias)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / TOKEN_IDS).write_text(json.dumps(_token_ids(model, folder)))


def tokenizer_origin() -> Path:
    """The GGUF file whose tokenizer all models have."""
    return open_checkpoint(_TOKENIZER_OF).weight_files[0].path


def _converted(alias: str) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    checkpoint = open_checkpoint(alias)
    with torch.device("meta"):
        module = _build(checkpoint.config)
    sources = resolve_parameters(module, checkpoint)
    kept = {name: source for name, source in sources.items() if source.tied_to is None}
    config = {**checkpoint.config.to_dict(), "dtype": "bfloat16", "architectures": [type(module).__name__]}
    config.pop("quantization_config", None)
    return config, {name: source.load().to(torch.bfloat16).contiguous() for name, source in kept.items()}


def _random(model: Model) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    config = LlamaConfig(
        vocab_size=model.vocab,
        hidden_size=model.hidden,
        intermediate_size=model.ffn,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    with torch.device("meta"):
        state = _build(config).state_dict()
    generator = torch.Generator().manual_seed(_SEED)
    tensors = {}
    for name, value in state.items():
        if name == "lm_head.weight":
            continue
        if value.dim() == 1:
            tensors[name] = torch.ones(value.shape, dtype=torch.bfloat16)
        else:
            tensors[name] = torch.empty(value.shape, dtype=torch.bfloat16).normal_(0, _STD, generator=generator)
    return config.to_dict(), tensors


def _token_ids(model: Model, folder: Path) -> list[int]:
    """Ids of English text; for random weights, random ids of the whole vocabulary."""
    if model.alias is None:
        return np.random.default_rng(_SEED).integers(2, model.vocab, _NUM_IDS).tolist()  # type: ignore[no-any-return]
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(builtin_text()[: 16 * _NUM_IDS]).ids
    return list(ids[:_NUM_IDS])

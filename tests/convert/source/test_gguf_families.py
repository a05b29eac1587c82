"""GGUF files of several families: names, layouts and value changes undone as transformers undoes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from inferencex.convert.source.mapping import resolve_parameters
from inferencex.convert.source.open import open_checkpoint

Build = Callable[[PreTrainedConfig], PreTrainedModel]

SIZES: dict[str, int | float] = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
    "vocab_size": 96,
}
ATTENTION = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
MLP = {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64)}
HEAD_NORMS = {"attn_q_norm": (8,), "attn_k_norm": (8,)}
NORMS = {"attn_norm": (32,), "ffn_norm": (32,)}
SANDWICH_NORMS = {**NORMS, "post_attention_norm": (32,), "post_ffw_norm": (32,)}
EXPERTS = {
    "ffn_gate_inp": (4, 32),
    "ffn_gate_exps": (4, 768, 32),
    "ffn_up_exps": (4, 768, 32),
    "ffn_down_exps": (4, 32, 768),
}

# family -> (settings beside SIZES, tensors of a layer, other tensors), shapes as in the file
FAMILIES: dict[str, tuple[dict[str, int | float], dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]] = {
    "qwen2": (
        {},
        {**ATTENTION, **MLP, **NORMS, "attn_q.bias": (32,), "attn_k.bias": (16,), "attn_v.bias": (16,)},
        {"output_norm": (32,), "output": (96, 32)},
    ),
    "qwen3moe": (
        {"attention.key_length": 8, "expert_count": 4, "expert_used_count": 2},
        {**ATTENTION, **HEAD_NORMS, **NORMS, **EXPERTS},
        {"output_norm": (32,), "output": (96, 32)},
    ),
    "gemma2": (
        {"attention.key_length": 8, "attention.sliding_window": 16},
        {**ATTENTION, **MLP, **SANDWICH_NORMS},
        {"output_norm": (32,)},
    ),
    "gemma3": (
        {"attention.key_length": 8, "attention.sliding_window": 16},
        {**ATTENTION, **MLP, **HEAD_NORMS, **SANDWICH_NORMS},
        {"output_norm": (32,)},
    ),
    "lfm2": (
        {"shortconv.l_cache": 3},
        {**MLP, **NORMS},
        {
            "token_embd_norm": (32,),
            "blk.0.shortconv.conv": (32, 3),
            "blk.0.shortconv.in_proj": (96, 32),
            "blk.0.shortconv.out_proj": (32, 32),
            **{f"blk.1.{name}": shape for name, shape in {**ATTENTION, **HEAD_NORMS}.items()},
        },
    ),
    "gpt2": (
        {"attention.layer_norm_epsilon": 1e-5},
        {
            "attn_norm": (32,),
            "attn_norm.bias": (32,),
            "attn_qkv": (96, 32),
            "attn_qkv.bias": (96,),
            "attn_output": (32, 32),
            "attn_output.bias": (32,),
            "ffn_norm": (32,),
            "ffn_norm.bias": (32,),
            "ffn_up": (128, 32),
            "ffn_up.bias": (128,),
            "ffn_down": (32, 128),
            "ffn_down.bias": (32,),
        },
        {"position_embd": (1024, 32), "output_norm": (32,), "output_norm.bias": (32,), "output": (96, 32)},
    ),
}


def write(
    path: Path, family: str, numbers: Mapping[str, float] | None = None, texts: Mapping[str, str] | None = None
) -> None:
    settings, layer, others = FAMILIES[family]
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, family)
    for key, value in {**SIZES, **settings, **(numbers or {})}.items():
        if family == "lfm2" and key == "attention.head_count_kv":
            # One count per layer: the first is a convolution.
            writer.add_array(f"{family}.{key}", [0, value])
            continue
        add: Any = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{family}.{key}", value)
    if family == "lfm2":
        writer.add_token_list([f"<{index}>" for index in range(96)])
        writer.add_token_types([1] * 96)
        writer.add_token_scores([0.0] * 96)
        writer.add_tokenizer_model("llama")
    for key, text in (texts or {}).items():
        writer.add_string(f"{family}.{key}", text)
    shapes = {f"blk.{block}.{name}": shape for block in range(2) for name, shape in layer.items()}
    for name, shape in {"token_embd": (96, 32), **shapes, **others}.items():
        suffix = "" if name.endswith(".bias") else ".weight"
        writer.add_tensor(name + suffix, rng.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_scaling_applies_to_the_layers_that_see_the_whole_context(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "gemma3", {"rope.scaling.factor": 8.0}, {"rope.scaling.type": "linear"})
    rope = open_checkpoint(str(path)).config.rope_parameters
    assert (rope["full_attention"]["rope_type"], rope["full_attention"]["factor"]) == ("linear", 8.0)
    assert rope["sliding_attention"]["rope_type"] == "default"


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_equal_transformers(tmp_path: Path, family: str, meta_model: Build) -> None:
    write(tmp_path / "model.gguf", family)
    checkpoint = open_checkpoint(str(tmp_path / "model.gguf"))
    parameters = resolve_parameters(meta_model(checkpoint.config), checkpoint)
    make: Any = AutoModelForCausalLM
    loaded = make.from_pretrained(
        tmp_path, gguf_file="model.gguf", config=checkpoint.config, dtype=torch.float32
    ).state_dict()
    assert list(parameters) == list(loaded)
    for name, expected in loaded.items():
        assert torch.equal(parameters[name].load(), expected), name
        assert torch.equal(parameters[name].rows(1, 3), expected[1:3]), name
    assert checkpoint.config.vocab_size == 96
    assert {name for source in parameters.values() for name in source.sources} == set(checkpoint.tensors)

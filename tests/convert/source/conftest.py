"""Small checkpoints to open: real layouts, random weights."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}

WriteSafetensors = Callable[[Path, Any, bytes], Path]


@pytest.fixture(scope="session")
def tiny() -> dict[str, Any]:
    """Sizes of a tiny model, in the names most configurations use."""
    return dict(TINY)


@pytest.fixture(scope="session")
def random_model() -> Callable[[PreTrainedConfig], PreTrainedModel]:
    """Build a model whose every parameter is random: no zeros or ones that could hide a swap."""

    def build(config: PreTrainedConfig) -> PreTrainedModel:
        make: Any = AutoModelForCausalLM
        model: PreTrainedModel = make.from_config(config)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(generator=generator)
        return model

    return build


@pytest.fixture(scope="session")
def meta_model() -> Callable[[PreTrainedConfig], PreTrainedModel]:
    """Build a model without memory."""

    def build(config: PreTrainedConfig) -> PreTrainedModel:
        with torch.device("meta"):
            make: Any = AutoModelForCausalLM
            model: PreTrainedModel = make.from_config(config)
        return model

    return build


@pytest.fixture
def llama_directory(tmp_path: Path, tiny: dict[str, Any]) -> Path:
    """A directory with config.json and one safetensors file of two tensors."""
    directory = tmp_path / "llama"
    directory.mkdir()
    LlamaConfig(**tiny).save_pretrained(directory)
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}, directory / "model.safetensors")
    return directory


@pytest.fixture
def sharded_directory(llama_directory: Path) -> Path:
    """The same tensors in two shards with an index."""
    (llama_directory / "model.safetensors").unlink()
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    save_file({"a": torch.arange(6.0).reshape(2, 3)}, llama_directory / names["a"])
    save_file({"b": torch.ones(4)}, llama_directory / names["b"])
    index = {"metadata": {"total_size": 40}, "weight_map": names}
    (llama_directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return llama_directory


@pytest.fixture
def write_safetensors() -> WriteSafetensors:
    """Write a safetensors file of any header, right or wrong."""

    def write(path: Path, header: Any, data: bytes) -> Path:
        raw = header if isinstance(header, bytes) else json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
        return path

    return write


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., dict[str, np.ndarray[Any, Any]]]:
    """Write a tiny Llama as GGUF and return its tensors by their GGUF names."""

    def write(
        path: Path,
        *,
        extra: Mapping[str, Any] | None = None,
        tensors: Mapping[str, np.ndarray[Any, Any]] | None = None,
        quantize: gguf.GGMLQuantizationType | None = None,
        tokenizer: bool = True,
        split_max_tensors: int = 0,
        architecture: str = "llama",
        rotated: int = 8,
    ) -> dict[str, np.ndarray[Any, Any]]:
        writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split_max_tensors)
        writer.add_block_count(TINY["num_hidden_layers"])
        writer.add_context_length(TINY["max_position_embeddings"])
        writer.add_embedding_length(TINY["hidden_size"])
        writer.add_feed_forward_length(64)
        writer.add_head_count(TINY["num_attention_heads"])
        writer.add_head_count_kv(TINY["num_key_value_heads"])
        writer.add_rope_dimension_count(rotated)
        writer.add_rope_freq_base(10000.0)
        writer.add_layer_norm_rms_eps(1e-5)
        if tokenizer:
            vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(90)), "▁", "a", "▁a"]
            writer.add_tokenizer_model("llama")
            writer.add_token_list(vocabulary)
            writer.add_token_scores([-float(index) for index in range(len(vocabulary))])
            writer.add_token_types([2, 3, 3, *[6] * 90, 1, 1, 1])
            writer.add_bos_token_id(1)
            writer.add_eos_token_id(2)
            writer.add_unk_token_id(0)
            writer.add_add_bos_token(True)
            writer.add_chat_template("{{ messages[0]['content'] }}")
        else:
            writer.add_vocab_size(TINY["vocab_size"])
        for key, value in (extra or {}).items():
            add: Any = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
            add(key, value)
        stored = dict(tensors) if tensors is not None else llama_tensors()
        for name, value in stored.items():
            if quantize is not None and value.ndim == 2:
                writer.add_tensor(name, gguf.quants.quantize(value, quantize), raw_dtype=quantize)
            else:
                writer.add_tensor(name, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return stored

    return write


def llama_tensors() -> dict[str, np.ndarray[Any, Any]]:
    """Random float32 tensors of a tiny Llama with tied embeddings, named and shaped as in GGUF."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray[Any, Any]:
        return rng.standard_normal(shape, dtype=np.float32)

    tensors = {"token_embd.weight": draw(96, 32), "output_norm.weight": draw(32)}
    for layer in range(2):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": draw(32),
            f"blk.{layer}.ffn_norm.weight": draw(32),
            f"blk.{layer}.attn_q.weight": draw(32, 32),
            f"blk.{layer}.attn_k.weight": draw(16, 32),
            f"blk.{layer}.attn_v.weight": draw(16, 32),
            f"blk.{layer}.attn_output.weight": draw(32, 32),
            f"blk.{layer}.ffn_gate.weight": draw(64, 32),
            f"blk.{layer}.ffn_up.weight": draw(64, 32),
            f"blk.{layer}.ffn_down.weight": draw(32, 64),
        }
    return tensors

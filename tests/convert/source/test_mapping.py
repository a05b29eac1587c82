from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from inferencex.convert.source.base import Checkpoint
from inferencex.convert.source.mapping import resolve_parameters
from inferencex.convert.source.open import open_checkpoint
from inferencex.convert.source.safetensors_file import SafetensorsHandle
from inferencex.formats.errors import SourceError

Build = Callable[[PreTrainedConfig], PreTrainedModel]

EXPERTS = {"num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {},
    "Qwen2Config": {"tie_word_embeddings": True},
    "MixtralConfig": {**EXPERTS, "num_local_experts": 4},
    "Qwen3MoeConfig": {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    "OlmoeConfig": {**EXPERTS, "num_experts": 4},
    "GptOssConfig": {**EXPERTS, "num_local_experts": 4, "head_dim": 8},
    "GraniteMoeConfig": {**EXPERTS, "num_local_experts": 4},
    "DeepseekV3Config": {
        **EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "Gemma3TextConfig": {"head_dim": 8},
    "Phi3Config": {},
    "GPT2Config": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "BloomConfig": {"n_layer": 2, "n_head": 4},
}


def make_config(name: str, tiny: dict[str, Any]) -> PreTrainedConfig:
    own_names = {"GPT2Config", "BloomConfig"}
    sizes = {"vocab_size": 96, "hidden_size": 32} if name in own_names else tiny
    if name == "GPT2Config":
        sizes = {"vocab_size": 96}
    config: PreTrainedConfig = getattr(transformers, name)(**{**sizes, **FAMILIES[name]})
    return config


def assert_equal(checkpoint: Checkpoint, model: PreTrainedModel, expected: dict[str, torch.Tensor]) -> None:
    parameters = resolve_parameters(model, checkpoint)
    assert list(parameters) == list(expected)
    used: set[str] = set()
    for name, value in expected.items():
        source = parameters[name]
        loaded = source.load()
        assert source.shape == tuple(value.shape) and loaded.dtype == source.dtype
        assert torch.equal(loaded, value), name
        for start, stop in ((1, 3), (0, 0), (-1, 100)):
            assert torch.equal(source.rows(start, stop), value[start:stop]), name
        used.update(source.sources)
    assert used == set(checkpoint.tensors)


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_equal_from_pretrained(
    tmp_path: Path, name: str, tiny: dict[str, Any], random_model: Build, meta_model: Build
) -> None:
    random_model(make_config(name, tiny)).save_pretrained(tmp_path, max_shard_size="20KB")
    checkpoint = open_checkpoint(str(tmp_path))
    assert len(checkpoint.weight_files) > 1
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert_equal(checkpoint, meta_model(checkpoint.config), expected)


def test_experts_are_stored_apart_and_read_by_row(
    tmp_path: Path, tiny: dict[str, Any], random_model: Build, meta_model: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_model(make_config("MixtralConfig", tiny)).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    source = resolve_parameters(meta_model(checkpoint.config), checkpoint)["model.layers.0.mlp.experts.gate_up_proj"]
    assert source.shape == (4, 96, 32) and len(source.sources) == 8
    whole = source.load()
    read: list[str] = []
    kind = SafetensorsHandle
    load = kind.load

    def recorded(handle: SafetensorsHandle) -> torch.Tensor:
        read.append(handle.name)
        return load(handle)

    monkeypatch.setattr(kind, "load", recorded)
    assert torch.equal(source.rows(2, 3), whole[2:3])
    assert len(read) == 2 and all(".experts.2." in name for name in read)


def test_shared_model(shared_data: Path, meta_model: Build) -> None:
    directory = shared_data / "stories260k"
    checkpoint = open_checkpoint(str(directory))
    assert_equal(
        checkpoint, meta_model(checkpoint.config), AutoModelForCausalLM.from_pretrained(directory).state_dict()
    )


@pytest.mark.parametrize("name", ["LlamaConfig", "GPT2Config"])
def test_base_model_without_its_prefix(
    tmp_path: Path, name: str, tiny: dict[str, Any], random_model: Build, meta_model: Build
) -> None:
    config = make_config(name, tiny)
    config.tie_word_embeddings = True
    model = random_model(config)
    base: Any = model.base_model
    base.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    assert not any(tensor.startswith(f"{model.base_model_prefix}.") for tensor in checkpoint.tensors)
    assert_equal(checkpoint, meta_model(config), model.state_dict())


def test_stored_type_is_kept(tmp_path: Path, tiny: dict[str, Any], random_model: Build, meta_model: Build) -> None:
    model: Any = random_model(make_config("MixtralConfig", tiny))
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    for source in resolve_parameters(meta_model(checkpoint.config), checkpoint).values():
        assert source.dtype == source.load().dtype == torch.bfloat16


@pytest.fixture
def llama(tmp_path: Path, tiny: dict[str, Any], random_model: Build) -> Path:
    random_model(LlamaConfig(**tiny)).save_pretrained(tmp_path)
    return tmp_path


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {name: value.clone() for name, value in load_file(directory / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def resolve(directory: Path, meta_model: Build) -> dict[str, Any]:
    checkpoint = open_checkpoint(str(directory))
    return resolve_parameters(meta_model(checkpoint.config), checkpoint)


GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(GATE), r"nothing fills 1 tensor\(s\): model\.layers\.1\.mlp\.gate_proj\.weight"),
        (lambda tensors: tensors.update(extra=torch.ones(2)), r"no place for 1 tensor\(s\): extra"),
        (
            lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}),
            r"no place for .*q_proj\.bias",
        ),
        (
            lambda tensors: tensors.update({GATE: torch.ones(32, 48)}),
            r"shapes differ for .*\(32, 48\), expected \(48, 32\)",
        ),
        (
            lambda tensors: tensors.update({GATE.removeprefix("model."): torch.ones(48, 32)}),
            "both give parameter",
        ),
    ],
)
def test_what_does_not_fit_is_named(
    llama: Path, meta_model: Build, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    rewrite(llama, change)
    with pytest.raises(SourceError, match=message):
        resolve(llama, meta_model)


def test_every_missing_and_surplus_name_is_given_at_once(llama: Path, meta_model: Build) -> None:
    def swap(tensors: dict[str, torch.Tensor]) -> None:
        tensors["surplus"] = tensors.pop(GATE)
        del tensors["model.norm.weight"]

    rewrite(llama, swap)
    with pytest.raises(SourceError, match=r"nothing fills 2 .*gate_proj.*model\.norm.*no place for 1 .*surplus"):
        resolve(llama, meta_model)


def test_tensors_the_model_declares_ignorable(llama: Path, meta_model: Build) -> None:
    rewrite(llama, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert resolve(llama, meta_model)


def test_expert_that_is_missing_or_of_another_shape(
    tmp_path: Path, tiny: dict[str, Any], random_model: Build, meta_model: Build
) -> None:
    random_model(make_config("MixtralConfig", tiny)).save_pretrained(tmp_path)
    name = next(name for name in load_file(tmp_path / "model.safetensors") if name.endswith("experts.3.w1.weight"))
    original = (tmp_path / "model.safetensors").read_bytes()
    rewrite(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(SourceError, match=r"experts\.gate_up_proj' cannot be made of 7 tensor"):
        resolve(tmp_path, meta_model)
    (tmp_path / "model.safetensors").write_bytes(original)
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.ones(4, 4)}))
    with pytest.raises(SourceError, match=r"experts\.gate_up_proj' cannot be made"):
        resolve(tmp_path, meta_model)
    (tmp_path / "model.safetensors").write_bytes(original)
    rewrite(tmp_path, lambda tensors: tensors.update({name: tensors[name].half()}))
    with pytest.raises(SourceError, match="joins tensors of different types"):
        resolve(tmp_path, meta_model)


def edit_tie(directory: Path, tied: bool) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))


def test_tied_head_is_the_embedding_under_either_name(llama: Path, meta_model: Build) -> None:
    edit_tie(llama, True)
    rewrite(llama, lambda tensors: tensors.pop("lm_head.weight"))
    parameters = resolve(llama, meta_model)
    embedding, head = parameters["model.embed_tokens.weight"], parameters["lm_head.weight"]
    assert embedding.tied_to is None and head.tied_to == "model.embed_tokens.weight"
    assert embedding.sources == head.sources == ("model.embed_tokens.weight",)

    rewrite(llama, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    parameters = resolve(llama, meta_model)
    embedding, head = parameters["model.embed_tokens.weight"], parameters["lm_head.weight"]
    assert embedding.tied_to is None and head.tied_to == "model.embed_tokens.weight"
    assert embedding.sources == head.sources == ("lm_head.weight",)


def test_tied_head_stored_twice(llama: Path, meta_model: Build) -> None:
    edit_tie(llama, True)
    with pytest.raises(SourceError, match=r"are tied in this model.*two different tensors.*tie_word_embeddings"):
        resolve(llama, meta_model)
    rewrite(llama, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert resolve(llama, meta_model)["lm_head.weight"].tied_to == "model.embed_tokens.weight"


def test_untied_head_that_is_absent(llama: Path, meta_model: Build) -> None:
    rewrite(llama, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(SourceError, match=r"nothing fills 1 tensor\(s\): lm_head\.weight"):
        resolve(llama, meta_model)


def with_buffer(model: PreTrainedModel, value: torch.Tensor) -> PreTrainedModel:
    """Add a persistent buffer that the checkpoint lacks."""
    model.register_buffer("extra", value)
    return model


def test_buffer_that_a_checkpoint_may_lack_keeps_the_value_of_the_model(llama: Path, meta_model: Build) -> None:
    checkpoint = open_checkpoint(str(llama))
    value = torch.arange(3.0)
    model = with_buffer(meta_model(checkpoint.config), value)
    with pytest.raises(SourceError, match=r"nothing fills 1 tensor\(s\): extra"):
        resolve_parameters(model, checkpoint)
    model._keys_to_ignore_on_load_missing = {"extra"}
    source = resolve_parameters(model, checkpoint)["extra"]
    assert torch.equal(source.load(), value) and torch.equal(source.rows(1, 2), value[1:2])
    assert source.sources == ()


def test_buffer_without_a_value_is_missing_whatever_the_model_allows(llama: Path, meta_model: Build) -> None:
    checkpoint = open_checkpoint(str(llama))
    model = with_buffer(meta_model(checkpoint.config), torch.empty(3, device="meta"))
    model._keys_to_ignore_on_load_missing = {"extra"}
    with pytest.raises(SourceError, match=r"nothing fills 1 tensor\(s\): extra"):
        resolve_parameters(model, checkpoint)


def test_fake_parameters_resolve_too(llama: Path) -> None:
    checkpoint = open_checkpoint(str(llama))
    with FakeTensorMode():
        make: Any = AutoModelForCausalLM
        model = make.from_config(checkpoint.config)
    expected = load_file(llama / "model.safetensors")
    for name, source in resolve_parameters(model, checkpoint).items():
        assert torch.equal(source.load(), expected[name])

"""Running a model with other weights, quantized inputs, and counting what weights take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from bench.accuracy.plain import (
    decoder_linears,
    load_model,
    logits_of,
    mean_squares,
    quantize_inputs,
    rounded,
    run_quantized,
    stored_bits,
)
from bench.accuracy.reference import reference_of

IDS = np.random.default_rng(0).integers(0, 64, (3, 12))
build: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    folder = tmp_path_factory.mktemp("checkpoint")
    build(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def changed(checkpoint: Path, folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    tensors = {name: change(name, value) for name, value in load_file(checkpoint / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text((checkpoint / "config.json").read_text())
    return folder


def test_the_decoders_linears_are_all_but_the_head(checkpoint: Path) -> None:
    names = decoder_linears(load_model(checkpoint))
    assert len(names) == 2 * 7
    assert "lm_head" not in names


def test_bits_are_those_of_what_is_stored(checkpoint: Path, tmp_path: Path) -> None:
    assert stored_bits(checkpoint, checkpoint) == 16.0
    other = changed(checkpoint, tmp_path, lambda name, value: value.float() if "mlp" in name else value)
    mlp, attention = 3 * 32 * 48, 2 * 32 * 32 + 2 * 32 * 16
    assert stored_bits(checkpoint, other) == pytest.approx((32 * mlp + 16 * attention) / (mlp + attention))


def test_all_but_embedding_and_head_is_the_quantized_models(checkpoint: Path, tmp_path: Path) -> None:
    def change(name: str, value: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(value) if "embed" in name else value * 0.5

    quantized = run_quantized(checkpoint, changed(checkpoint, tmp_path, change), "float32")
    model = load_model(checkpoint)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed" not in name:
                parameter *= 0.5
    np.testing.assert_array_equal(quantized(IDS[0]), logits_of(model)(IDS[0]))


def test_inputs_are_rounded_with_a_scale_for_every_token(checkpoint: Path) -> None:
    values = torch.randn(5, 32, generator=torch.Generator().manual_seed(1)) * torch.tensor([[1], [9], [0.1], [0], [3]])
    for kind, largest, number in (
        ("int8", 127.0, np.rint),
        ("fp8", 448.0, lambda v: v.astype(ml_dtypes.float8_e4m3fn)),
    ):
        scales = np.maximum(np.abs(values.numpy()).max(-1, keepdims=True) / np.float32(largest), np.float32(1e-37))
        expected = number(values.numpy() / scales).astype(np.float32) * scales
        np.testing.assert_allclose(rounded(values, kind).numpy(), expected, rtol=1e-6)  # type: ignore[arg-type]
    model = load_model(checkpoint)
    exact = logits_of(model)(IDS[0])
    quantize_inputs(decoder_linears(model).values(), "int8")
    difference = np.abs(logits_of(model)(IDS[0]) - exact).max()
    assert 1e-5 < difference < 0.5 * np.abs(exact).max()


def test_importance_is_the_mean_square_of_inputs(checkpoint: Path) -> None:
    model = load_model(checkpoint)
    seen: list[torch.Tensor] = []
    name = "model.layers.1.mlp.down_proj"
    handle = model.get_submodule(name).register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0][0]))
    found = mean_squares(model, IDS)
    handle.remove()
    assert set(found) == set(decoder_linears(model))
    np.testing.assert_allclose(found[name], torch.cat(seen).double().square().mean(0).numpy(), rtol=1e-5)


def test_the_reference_is_the_source_and_is_kept(checkpoint: Path, tmp_path: Path) -> None:
    run = logits_of(load_model(checkpoint))
    first = reference_of(checkpoint, IDS, tmp_path)
    kept = [file.name for file in tmp_path.iterdir()]
    again = reference_of(checkpoint, IDS, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == kept
    for one, other, window in zip(first.logits(), again.logits(), IDS, strict=True):
        np.testing.assert_allclose(one, run(window), atol=1e-5)
        np.testing.assert_array_equal(one, other)


def test_a_model_that_changes_logits_behind_the_head_is_refused(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.accuracy.reference.logits_of", lambda model: lambda ids: 2 * logits_of(model)(ids))
    with pytest.raises(ValueError, match="behind the head are not supported"):
        reference_of(checkpoint, IDS, tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))

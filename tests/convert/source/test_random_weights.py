from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel

from inferencex.convert.source.mapping import resolve_parameters
from inferencex.convert.source.open import open_checkpoint
from inferencex.convert.source.random_weights import for_parameters

Build = Callable[[PreTrainedConfig], PreTrainedModel]
SHAPE = (1100, 1000)  # more than one block of values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_rows_equal_those_of_the_whole(dtype: torch.dtype) -> None:
    handle = for_parameters({"w": (SHAPE, dtype)}, seed=1)["w"]
    whole = handle.load()
    assert whole.dtype == handle.dtype == dtype and tuple(whole.shape) == handle.shape == SHAPE
    for start, stop in ((0, 1), (5, 5), (1040, 1060), (1099, 2000), (0, 1100), (-3, 1100)):
        assert torch.equal(handle.rows(start, stop), whole[start:stop])


def test_values_are_normal_with_the_deviation_asked_for() -> None:
    whole = for_parameters({"w": (SHAPE, torch.float32)}, seed=1, std=0.5)["w"].load().flatten()
    assert abs(float(whole.mean())) < 2e-3 and abs(float(whole.std()) - 0.5) < 2e-3
    assert abs(float((whole.abs() < 0.5).float().mean()) - 0.6827) < 2e-3
    assert abs(float((whole.abs() < 1.0).float().mean()) - 0.9545) < 2e-3
    assert abs(float(torch.corrcoef(torch.stack([whole[:-1], whole[1:]]))[0, 1])) < 5e-3


def test_values_depend_on_seed_and_name_only() -> None:
    def draw(name: str, seed: int) -> torch.Tensor:
        return for_parameters({name: ((64, 64), torch.float32)}, seed=seed)[name].load()

    assert torch.equal(draw("a", 0), draw("a", 0))
    assert not torch.equal(draw("a", 0), draw("b", 0))
    assert not torch.equal(draw("a", 0), draw("a", 1))


def test_values_are_the_same_on_every_machine() -> None:
    handle = for_parameters({"w": ((2, 3), torch.float32)}, seed=0)["w"]
    expected = [[0.0027190, 0.0276635, -0.0117418], [-0.0215128, -0.0005122, -0.0053462]]
    assert torch.allclose(handle.load(), torch.tensor(expected), atol=1e-6)


def test_config_alone_gives_every_parameter(tmp_path: Path, tiny: dict[str, Any], meta_model: Build) -> None:
    LlamaConfig(**tiny, attention_bias=True, tie_word_embeddings=True, initializer_range=0.1).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path), random_weights=True, seed=5)
    assert checkpoint.kind == "random" and checkpoint.tensors == {} and checkpoint.nbytes == 0
    assert checkpoint.provenance() == {"id": tmp_path.name, "kind": "random", "revision": None, "files": [], "seed": 5}
    model = meta_model(checkpoint.config)
    parameters = resolve_parameters(model, checkpoint)
    assert list(parameters) == list(model.state_dict())
    assert bool((parameters["model.norm.weight"].load() == 1).all())
    assert bool((parameters["model.layers.0.self_attn.q_proj.bias"].load() == 0).all())
    assert abs(float(parameters["model.embed_tokens.weight"].load().std()) - 0.1) < 0.01
    head = parameters["lm_head.weight"]
    assert head.tied_to == "model.embed_tokens.weight"
    assert torch.equal(head.load(), parameters["model.embed_tokens.weight"].load())


def test_made_up_model_computes_finite_logits(
    tmp_path: Path, tiny: dict[str, Any], meta_model: Build, random_model: Build
) -> None:
    config = LlamaConfig(**tiny)
    config.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path), random_weights=True)
    parameters = resolve_parameters(meta_model(checkpoint.config), checkpoint)
    model = random_model(config)
    model.load_state_dict({name: source.load() for name, source in parameters.items()})
    with torch.no_grad():
        logits = model(torch.arange(10)[None]).logits
    assert bool(logits.isfinite().all()) and float(logits.std()) > 0

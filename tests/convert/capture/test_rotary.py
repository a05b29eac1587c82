"""Frequencies that depend on the length of a sequence follow each token's own sequence."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from inferencex.convert.capture import capture, rotary
from inferencex.convert.passes import optimize
from tests.architectures import zoo

ORIGINAL = 16
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 5.0, 7.0],
}


def _config(parameters: dict[str, Any]) -> Any:
    limit = 64 if parameters["rope_type"] == "longrope" else ORIGINAL
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return zoo.tiny_config("llama", max_position_embeddings=limit, rope_parameters=dict(parameters), **sizes)


def _rotary(model: torch.nn.Module) -> torch.nn.Module:
    (module,) = [m for m in model.modules() if hasattr(m, "rope_type")]
    return module


def _source(config: Any, length: int) -> tuple[Tensor, Tensor]:
    """What transformers computes for one whole sequence."""
    module = copy.deepcopy(_rotary(zoo.build(copy.deepcopy(config), 0)))
    cos, sin = module(torch.zeros(1, length, 32), torch.arange(length)[None])
    return cos[0], sin[0]


@pytest.mark.parametrize("parameters", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
def test_a_ragged_row_of_sequences_equals_each_alone(parameters: dict[str, Any]) -> None:
    config = _config(parameters)
    model = zoo.build(copy.deepcopy(config), 0)
    lengths = [5, 16, 17, 3, 40]
    prompts = torch.cat([torch.full((n,), n) for n in lengths])[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with rotary.length_aware(model, prompts) as matters:
        assert matters
        cos, sin = _rotary(model)(torch.zeros(1, positions.shape[1], 32), positions)
    for at, length in zip(torch.tensor([0, *lengths]).cumsum(0), lengths, strict=False):
        for got, expected in zip((cos, sin), _source(config, length), strict=True):
            torch.testing.assert_close(got[0, at : at + length], expected, atol=2e-6, rtol=2e-6)


def test_the_lengths_make_a_difference_here() -> None:
    for parameters in (DYNAMIC, LONGROPE):
        config = _config(parameters)
        assert (_source(config, 40)[0][:16] - _source(config, 16)[0]).abs().max() > 0.01


def test_models_are_left_as_they_were() -> None:
    model = zoo.build(_config(LONGROPE), 0)
    before = dict(_rotary(model).__dict__)
    with rotary.length_aware(model, torch.ones(1, 4, dtype=torch.int64)):
        assert "forward" in _rotary(model).__dict__
    assert set(_rotary(model).__dict__) == set(before)


def test_plain_frequencies_are_left_alone() -> None:
    model = zoo.build(zoo.tiny_config("llama"), 0)
    with rotary.length_aware(model, torch.ones(1, 4, dtype=torch.int64)) as matters:
        assert not matters and "forward" not in _rotary(model).__dict__


@pytest.mark.parametrize("parameters", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
def test_angles_stay_computed_in_the_graph(parameters: dict[str, Any]) -> None:
    captured = capture(_config(parameters))
    assert captured.uses_prompt_lengths
    result = optimize(captured, max_positions=64)
    assert "prompt_lengths" in [v.name for v in result.model.graph.inputs]
    nodes = [node for node in result.model.graph if node.op_type == "RotaryEmbedding"]
    assert nodes and all(len(node.inputs) == 3 for node in nodes)
    assert {table.producer() is None for node in nodes for table in node.inputs[1:3] if table is not None} == {False}
    assert not [name for name in result.model.graph.initializers if name.startswith("rope_table")]


def test_angles_become_tables_where_the_length_does_not_matter() -> None:
    captured = capture(zoo.tiny_config("llama"))
    assert not captured.uses_prompt_lengths
    result = optimize(captured, max_positions=64)
    (cos, sin) = {node.inputs[i] for node in result.model.graph if node.op_type == "RotaryEmbedding" for i in (1, 2)}
    assert {cos.producer().op_type, sin.producer().op_type} == {"Cos", "Sin"}
    assert [name for name in result.model.graph.initializers if name.startswith("rope_")] == ["rope_frequencies.0"]

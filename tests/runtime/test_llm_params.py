"""What may be asked, and what the model's own defaults add."""

from __future__ import annotations

from typing import Any

import pytest

from inferencex.formats.errors import BundleError, RequestError
from inferencex.runtime import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", None),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", 1e30),
        ("presence_penalty", 2.1),
        ("presence_penalty", None),
        ("frequency_penalty", -3),
        ("logit_bias", {1: 101}),
        ("logit_bias", {"1": 1}),
        ("logit_bias", [1]),
        ("seed", 1.0),
        ("stop", ["a", ""]),
        ("stop", ""),
        ("stop", [1]),
        ("stop", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("min_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", 1.0),
        ("ignore_eos", 1),
        ("logprobs", -1),
        ("logprobs", True),
        ("prompt_logprobs", -1),
        ("skip_special_tokens", None),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: value})


def test_combinations_that_make_no_sense_are_refused() -> None:
    with pytest.raises(RequestError, match=r"min_tokens=5 .* max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(RequestError, match="2 equal answers"):
        SamplingParams(n=2, temperature=0.0)


def test_null_means_default() -> None:
    fields: dict[str, Any] = {
        "stop": None,
        "stop_token_ids": None,
        "logit_bias": None,
        "max_tokens": None,
        "seed": None,
    }
    assert SamplingParams(**fields) == SamplingParams()
    assert SamplingParams(stop="x") == SamplingParams(stop=["x"])


def test_defaults_of_a_generation_config() -> None:
    sampled = SamplingParams.from_generation_config(
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": None, "eos_token_id": 3, "max_new_tokens": 64}
    )
    assert (sampled.temperature, sampled.top_p, sampled.top_k, sampled.max_tokens) == (0.6, 0.9, None, 64)
    for config in ({}, {"do_sample": False, "temperature": 0.6, "top_k": 5}, {"temperature": 0.6, "top_k": 5}):
        greedy = SamplingParams.from_generation_config(config)
        assert (greedy.temperature, greedy.top_k) == (0.0, None)
    assert SamplingParams.from_generation_config({"repetition_penalty": 1.1}).repetition_penalty == 1.1
    with pytest.raises(BundleError, match=r"generation_config\.json: temperature is 'x'"):
        SamplingParams.from_generation_config({"do_sample": True, "temperature": "x"})


def test_what_the_user_sets_wins() -> None:
    defaults = SamplingParams(temperature=0.6, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.2, max_tokens=64)
    resolved = SamplingParams(temperature=0.0, top_p=1.0).with_defaults(defaults)
    assert (resolved.temperature, resolved.top_p, resolved.top_k, resolved.min_p) == (0.0, 1.0, 40, 0.1)
    assert (resolved.repetition_penalty, resolved.max_tokens) == (1.2, 64)
    bare = SamplingParams().with_defaults(SamplingParams())
    assert (bare.temperature, bare.top_p, bare.top_k, bare.min_p) == (1.0, 1.0, 0, 0.0)
    assert (bare.repetition_penalty, bare.max_tokens) == (1.0, None)
    assert SamplingParams(min_tokens=100).with_defaults(defaults).max_tokens == 100


@pytest.mark.parametrize("fields", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"seed": 1}, {"n": 2}])
def test_asking_for_randomness_overrides_a_greedy_default(fields: dict[str, Any]) -> None:
    greedy = SamplingParams(temperature=0.0)
    assert SamplingParams().with_defaults(greedy).temperature == 0.0
    assert SamplingParams(**fields).with_defaults(greedy).temperature == 1.0

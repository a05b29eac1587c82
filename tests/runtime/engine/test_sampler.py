"""The sampler against definitions written out the long way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferencex.runtime.engine.logprobs import largest, ranked_logprobs
from inferencex.runtime.engine.sampler import SequenceSampler
from inferencex.runtime.params import SamplingParams

ROW = np.array([2.0, -1.0, 0.5, 3.0, 0.0, 2.5, -4.0, 1.0], dtype=np.float32)


def sampler(prompt: tuple[int, ...] = (), stop: tuple[int, ...] = (), index: int = 0, **fields: Any) -> SequenceSampler:
    fields.setdefault("temperature", 1.0)
    return SequenceSampler(SamplingParams(**fields), index, prompt, stop)


def drawn(logits: np.ndarray[Any, Any], count: int = 4000, **fields: Any) -> np.ndarray[Any, Any]:
    """Frequencies of tokens over many draws of one row."""
    source = sampler(seed=7, **fields)
    tokens = [source.choose(logits) for _ in range(count)]
    return np.bincount(tokens, minlength=len(logits)) / count


def softmax(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    exponentials = np.exp(values.astype(np.float64) - values.max())
    return np.asarray(exponentials / exponentials.sum())


def allowed(logits: np.ndarray[Any, Any], temperature: float, k: int, p: float, m: float) -> set[int]:
    """Tokens that top-k, top-p and min-p leave, token by token in order of probability."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if k > 0:
        order = order[:k]
    probabilities = softmax(logits[order].astype(np.float64) / temperature)
    kept, total = [], 0.0
    for token, probability in zip(order, probabilities, strict=True):
        if p < 1.0 and total >= p:
            break
        kept.append((token, probability))
        total += probability
    return {token for token, probability in kept if probability >= m * kept[0][1]}


def test_greedy_takes_the_largest_and_the_first_on_a_tie() -> None:
    assert sampler(temperature=0.0).choose(ROW) == 3
    assert sampler(temperature=0.0).choose(np.array([1, 5, 5, 2], dtype=np.float32)) == 1
    assert sampler(temperature=0.0).takes_argmax
    assert not sampler(temperature=0.0, logit_bias={1: 1.0}).takes_argmax


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    expected = softmax(ROW / temperature)
    assert np.abs(drawn(ROW, temperature=temperature) - expected).max() < 0.03


def test_filtered_frequencies_are_renormalized() -> None:
    for k, p, m in ((3, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.3)):
        kept = sorted(allowed(ROW, 1.0, k, p, m))
        expected = np.zeros(len(ROW))
        expected[kept] = softmax(ROW[kept])
        assert np.abs(drawn(ROW, top_k=k, top_p=p, min_p=m) - expected).max() < 0.03


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([1, 2, 5, 63, 64, 65, 300, 700]),
    spread=st.sampled_from([0.1, 1.0, 6.0]),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    k=st.sampled_from([0, -1, 1, 3, 40, 1000]),
    p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    m=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_only_what_the_filters_leave_is_drawn(
    seed: int, size: int, spread: float, temperature: float, k: int, p: float, m: float
) -> None:
    logits = (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)
    kept = allowed(logits, temperature, k, p, m)
    source = sampler(seed=seed, temperature=temperature, top_k=k, top_p=p, min_p=m)
    found = {source.choose(logits) for _ in range(50 + 20 * min(len(kept), 5))}
    assert found <= kept
    if len(kept) == 1 or (len(kept) <= 3 and spread < 1):
        assert found == kept


@given(st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 3.0]), min_size=1, max_size=40), st.integers(1, 50))
def test_largest_is_the_head_of_a_stable_sort(values: list[float], count: int) -> None:
    row = np.array(values, dtype=np.float32)
    assert largest(row, count).tolist() == sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def test_penalties_are_those_of_their_definitions() -> None:
    prompt, output = (0, 1), (3, 3, 2)
    source = sampler(
        prompt, temperature=0.0, repetition_penalty=1.5, presence_penalty=0.25, frequency_penalty=0.5, logit_bias={7: 2}
    )
    for token in output:
        source.record(token)
    expected = ROW.astype(np.float64).copy()
    for token in set(prompt + output):
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    for token in set(output):
        expected[token] -= 0.25 + 0.5 * output.count(token)
    expected[7] += 2
    adjusted = source._adjust(ROW.copy())
    np.testing.assert_allclose(adjusted, expected, rtol=1e-6)
    assert source.choose(ROW) == int(expected.argmax()) == 7
    assert ROW[7] == 1.0, "the logits were changed in place"


def test_the_prompt_counts_for_repetition_only() -> None:
    plain = sampler((3,), temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    assert plain.choose(ROW) == 3
    assert sampler((3,), temperature=0.0, repetition_penalty=2.0).choose(ROW) == 5


def test_logit_bias_can_ban_and_force() -> None:
    assert sampler(temperature=0.0, logit_bias={3: -100}).choose(ROW) == 5
    assert drawn(ROW, 50, logit_bias={6: 100})[6] == 1.0


def test_min_tokens_masks_what_would_end_the_output() -> None:
    source = sampler(stop=(3, 5), temperature=0.0, min_tokens=2)
    for expected in (0, 0, 3):
        token = source.choose(ROW)
        assert token == expected
        source.record(token)


def test_a_seed_fixes_the_choices_and_its_absence_does_not() -> None:
    row = np.zeros(1000, dtype=np.float32)

    def tokens(**fields: Any) -> list[int]:
        source = sampler(**fields)
        return [source.choose(row) for _ in range(8)]

    assert tokens(seed=5) == tokens(seed=5)
    assert tokens(seed=5) != tokens(seed=6)
    assert tokens(seed=5, index=0) != tokens(seed=5, index=1)
    assert tokens(seed=-1) == tokens(seed=-1)
    assert tokens() != tokens()


def test_extreme_temperatures_and_logits() -> None:
    row = np.array([1e30, -1e30, 3.0], dtype=np.float32)
    assert sampler(temperature=1e-4, seed=0).choose(row) == 0
    assert sampler(temperature=100.0, seed=0, top_p=0.5).choose(row) == 0
    assert (drawn(ROW, temperature=1e6) > 0.08).all()


def test_logprobs_are_a_log_softmax() -> None:
    expected = np.log(softmax(ROW))
    only = ranked_logprobs(ROW, 4, 0)
    assert [(r.token_id, r.rank) for r in only] == [(4, 6)]
    assert only[0].logprob == pytest.approx(expected[4])
    inside = ranked_logprobs(ROW, 5, 3)
    assert [(r.token_id, r.rank) for r in inside] == [(5, 2), (3, 1), (0, 3)]
    outside = ranked_logprobs(ROW, 6, 2)
    assert [(r.token_id, r.rank) for r in outside] == [(6, 8), (3, 1), (5, 2)]
    for ranked in inside + outside:
        assert ranked.logprob == pytest.approx(expected[ranked.token_id])
    everything = ranked_logprobs(ROW, 0, len(ROW))
    assert sum(np.exp(r.logprob) for r in everything) == pytest.approx(1.0)

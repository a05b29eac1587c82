"""Native choices against the sampler's definition: the same tokens from the same random numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from inferencex.runtime.engine.native import _sampler
from inferencex.runtime.engine.sampler import SequenceSampler, choose_tokens
from inferencex.runtime.params import SamplingParams

SIZES = [1, 2, 5, 16, 17, 63, 255, 256, 257, 700, 4097, 50_000]


def random_logits(seed: int, size: int, kind: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    random = np.random.default_rng(seed)
    normal = random.standard_normal(size)
    match kind:
        case "ties":
            normal = np.round(2 * normal)
        case "flat":
            normal = np.full(size, 1.5)
        case "peaked":
            normal[random.integers(size)] += 30
        case "extreme":
            normal *= 10.0 ** random.integers(-30, 30, size)
    return normal.astype(np.float32)


@st.composite
def parameters(draw: st.DrawFn, size: int) -> tuple[SamplingParams, tuple[int, ...]]:
    """Sampling parameters, and token ids that end the output."""
    token = st.integers(0, size - 1)
    stop = tuple(draw(st.lists(token, max_size=3, unique=True)))
    penalized = draw(st.booleans())
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 2e-5, 0.3, 0.7, 1.0, 1.7, 50.0, 1e6, 1e30])),
        top_k=draw(st.sampled_from([0, -1, 1, 2, 40, 300, 1000, size, size + 1])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.999999, 0.95, 0.5, 1e-9])),
        min_p=draw(st.sampled_from([0.0, 0.0, 1e-6, 0.1, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.5])) if penalized else 1.0,
        presence_penalty=draw(st.sampled_from([0.0, 0.6, -2.0])) if penalized else 0.0,
        frequency_penalty=draw(st.sampled_from([0.0, 0.3])) if penalized else 0.0,
        logit_bias=draw(st.dictionaries(token, st.sampled_from([-100.0, -0.5, 0.1, 100.0]), max_size=3)),
        min_tokens=draw(st.sampled_from([0, 0, 2])),
        seed=draw(st.integers(0, 99)),
    ), stop


@settings(max_examples=300, deadline=None)
@given(data=st.data(), size=st.sampled_from(SIZES), seed=st.integers(0, 10**6))
def test_native_choices_are_those_of_the_definition(data: st.DataObject, size: int, seed: int) -> None:
    kinds = st.sampled_from(["normal", "wide", "ties", "flat", "peaked", "extreme"])
    prompt = tuple(np.random.default_rng(seed).integers(0, size, 9).tolist())
    native, defined = [], []
    for index in range(data.draw(st.integers(1, 3))):
        params, stop = data.draw(parameters(size))
        native.append(SequenceSampler(params, index, prompt, stop))
        defined.append(SequenceSampler(params, index, prompt, stop))
    for step in range(4):
        logits = np.stack([random_logits(seed + 7 * step + row, size, data.draw(kinds)) for row in range(4)])
        if data.draw(st.booleans()):
            logits *= np.float32(6)
        before = logits.copy()
        rows = [data.draw(st.integers(0, 3)) for _ in native]
        tokens = choose_tokens(logits, rows, native)
        expected = [sampler.choose(logits[row]) for sampler, row in zip(defined, rows, strict=True)]
        assert tokens == expected
        assert np.array_equal(logits, before)
        for first, second, token in zip(native, defined, expected, strict=True):
            first.record(token)
            second.record(token)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_k": 40},
        {"top_k": 1000, "top_p": 0.9},
        {"top_p": 0.9},
        {"top_p": 0.95, "min_p": 0.05},
        {"min_p": 0.1},
        {"temperature": 0.3, "top_p": 0.99, "repetition_penalty": 1.1},
        {"temperature": 3.0, "top_p": 0.999},
    ],
)
def test_ordinary_logits_leave_nothing_undecided(fields: dict[str, Any]) -> None:
    random = np.random.default_rng(3)
    logits = (random.standard_normal((8, 49_152)) * 3).astype(np.float32)
    samplers = [SequenceSampler(SamplingParams(**{"temperature": 0.8, **fields}), 0, (1, 2), ()) for _ in range(8)]
    rules = [sampler.rule for sampler in samplers]
    for _ in range(20):
        answers = _sampler.choose(logits, range(8), rules, random.random(8).tolist())
        assert min(answers) >= 0
        assert len(set(answers)) > 1


@pytest.mark.parametrize("signs", [(-1, 1), (1, -1), (-1, -1), (1, 1)])
def test_zeros_of_both_signs_are_equal(signs: tuple[int, int]) -> None:
    logits = np.array([[0.0 * signs[0], -1.0, -3.0, 0.0 * signs[1], -1.0]], dtype=np.float32)
    params = SamplingParams(temperature=0.7, top_p=0.999999, seed=2)
    native, defined = (SequenceSampler(params, 0, (), ()) for _ in range(2))
    for _ in range(50):
        assert choose_tokens(logits, [0], [native]) == [defined.choose(logits[0])]


def test_close_calls_are_left_to_the_definition() -> None:
    """Half of the mass is the border between two equal tokens, and half of the nucleus, too."""
    logits = np.zeros((1, 4), dtype=np.float32)
    for fields, border in (({}, 0.5), ({"top_p": 0.5}, 0.25), ({"top_k": 2}, 0.5), ({"top_k": 3, "min_p": 1.0}, 1 / 3)):
        sampler = SequenceSampler(SamplingParams(temperature=1.0, **fields), 0, (), ())
        assert _sampler.choose(logits, [0], [sampler.rule], [border]) == [_sampler.UNDECIDED]
        assert choose_tokens(logits, [0], [sampler])[0] in range(4)


def test_with_every_token_masked_the_first_is_taken() -> None:
    sampler = SequenceSampler(SamplingParams(temperature=1.0, min_tokens=1), 0, (), (0, 1, 2))
    assert sampler.choose(np.ones(3, dtype=np.float32)) == 0
    assert choose_tokens(np.ones((1, 3), dtype=np.float32), [0], [sampler]) == [0]


@given(
    arrays.arrays(
        np.float32, st.integers(1, 600), elements=st.sampled_from([-0.0, 0.0, -1.5, 2.0, 2.0000002, 3e38, -3e38, 1e-45])
    )
)
def test_greedy_rows_take_what_numpy_takes(row: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    assert _sampler.choose(row[None], [0], [None], [0.0]) == [int(row.argmax())]


@pytest.mark.parametrize("size", [1, 15, 256, 257, 3000])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_told_apart(size: int, bad: float) -> None:
    samplers = [SequenceSampler(SamplingParams(temperature=t, seed=1), 0, (), ()) for t in (0.0, 1.0, 0.0)]
    for place in {0, size // 2, size - 1}:
        logits = random_logits(place, 3 * size, "normal").reshape(3, size)
        logits[1, place] = bad
        tokens = choose_tokens(logits, [0, 1, 2], samplers)
        assert tokens == [int(logits[0].argmax()), None, int(logits[2].argmax())]
        assert [_sampler.all_finite(logits, *span) for span in ((0, 1), (1, 1), (2, 1), (0, 3), (2, 0))] == [
            True,
            False,
            True,
            False,
            True,
        ]


def test_any_layout_of_the_logits_will_do() -> None:
    logits = random_logits(5, 3 * 700, "normal").reshape(3, 700)
    fixed = logits.copy()
    fixed.flags.writeable = False
    expected = logits.argmax(axis=1).tolist()
    for array in (fixed, np.asfortranarray(logits), np.repeat(logits, 2, axis=1)[:, ::2]):
        assert _sampler.choose(array, [0, 1, 2], [None] * 3, [0.0] * 3) == expected


def test_greedy_requests_take_no_random_numbers() -> None:
    logits = random_logits(1, 50, "normal")[None]
    sampler = SequenceSampler(SamplingParams(temperature=0.0, seed=4, presence_penalty=1.0), 0, (), ())
    assert {choose_tokens(logits, [0], [sampler])[0] for _ in range(5)} == {int(logits.argmax())}
    assert sampler._random is None  # not even made
    sampled = SequenceSampler(SamplingParams(temperature=1.0, seed=4), 0, (), ())
    first = np.random.Generator(np.random.PCG64(np.random.SeedSequence([4, 0]))).random()
    assert sampled.draw_uniform() == first


def test_rows_and_tokens_outside_the_logits_are_refused() -> None:
    logits = np.zeros((2, 10), dtype=np.float32)
    for row in (-1, 2):
        with pytest.raises(IndexError, match="no such row"):
            _sampler.choose(logits, [row], [None], [0.0])
    with pytest.raises(IndexError, match="no such row"):
        _sampler.all_finite(logits, 1, 2)
    with pytest.raises(ValueError, match="for each row"):
        _sampler.choose(logits, [0, 1], [None], [0.0])
    for fields in ({"logit_bias": {10: 1.0}}, {"repetition_penalty": 1.1}):
        sampler = SequenceSampler(SamplingParams(temperature=0.0, **fields), 0, (10,), ())
        with pytest.raises(IndexError, match="token id 10 is not in the vocabulary of 10"):
            choose_tokens(logits, [0], [sampler])
    with pytest.raises(IndexError, match="negative"):
        SequenceSampler(SamplingParams(temperature=0.0, repetition_penalty=1.1), 0, (-1,), ())

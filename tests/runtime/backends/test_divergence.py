"""Divergence of predictions, against the formulas written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferencex.runtime.backends import divergence
from inferencex.runtime.backends.base import Float32Array
from inferencex.runtime.backends.divergence import Divergence


def _logits(generator: np.random.Generator, tokens: int, vocabulary: int) -> Float32Array:
    return generator.normal(scale=3, size=(tokens, vocabulary)).astype(np.float32)


def _expected(p: Float32Array, q: Float32Array, ids: list[int]) -> tuple[list[float], float, float]:
    """KL by token, and the log-likelihoods of the text by each."""

    def softmax(row: Float32Array) -> list[float]:
        weights = [math.exp(float(value)) for value in row]
        return [weight / sum(weights) for weight in weights]

    kl = []
    for row_p, row_q in zip(p, q, strict=True):
        pairs = zip(softmax(row_p), softmax(row_q), strict=True)
        kl.append(sum(a * math.log(a / b) for a, b in pairs))
    likelihoods = [sum(math.log(softmax(rows[i])[ids[i + 1]]) for i in range(len(ids) - 1)) for rows in (p, q)]
    return kl, likelihoods[0], likelihoods[1]


@settings(deadline=None, max_examples=25)
@given(
    tokens=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    vocabulary=st.integers(2, 12),
    at_once=st.integers(1, 60),
    seed=st.integers(0, 99),
)
def test_figures(tokens: list[int], vocabulary: int, at_once: int, seed: int) -> None:
    """However many windows there are, and in however many parts each is taken in."""
    generator = np.random.default_rng(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(divergence, "_VALUES_AT_ONCE", at_once)
        found, kl, same, log_p, log_q = Divergence(), [], 0, 0.0, 0.0
        for count in tokens:
            p, q = _logits(generator, count, vocabulary), _logits(generator, count, vocabulary)
            ids = generator.integers(0, vocabulary, count).tolist()
            found.add(p, q, ids)
            window_kl, window_p, window_q = _expected(p, q, ids)
            kl += window_kl
            log_p, log_q = log_p + window_p, log_q + window_q
            same += int((p.argmax(-1) == q.argmax(-1)).sum())
    summary = found.summary()
    assert summary.tokens == sum(tokens)
    assert summary.mean_kl == pytest.approx(np.mean(kl), abs=1e-9)
    assert summary.p99_kl == pytest.approx(np.quantile(kl, 0.99), abs=1e-9)
    assert summary.same_top1 == same / sum(tokens)
    predicted = sum(tokens) - len(tokens)
    if predicted:
        assert summary.reference_perplexity == pytest.approx(math.exp(-log_p / predicted))
        assert summary.perplexity == pytest.approx(math.exp(-log_q / predicted))
    else:
        assert math.isnan(summary.perplexity)


def test_a_model_and_itself() -> None:
    logits = _logits(np.random.default_rng(0), 20, 50) + 1e4
    found = Divergence()
    found.add(logits, logits, list(range(20)))
    summary = found.summary()
    assert summary.mean_kl == summary.p99_kl == 0
    assert summary.same_top1 == 1
    assert summary.perplexity == summary.reference_perplexity


def test_what_is_not_finite_shows() -> None:
    logits = _logits(np.random.default_rng(0), 4, 5)
    broken = logits.copy()
    broken[2, 3] = np.nan
    found = Divergence()
    found.add(logits, broken, [0, 1, 2, 3])
    assert math.isnan(found.summary().mean_kl)
    assert math.isnan(Divergence().summary().mean_kl)

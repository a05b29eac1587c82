"""What is measured, beside the formulas written out in float64."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.accuracy.figures import compare, read_logits

WINDOWS, LENGTH, VOCAB = 3, 17, 101


def logits(seed: int, spread: float = 3.0) -> NDArray[np.float32]:
    return (spread * np.random.default_rng(seed).standard_normal((WINDOWS, LENGTH, VOCAB))).astype(np.float32)


def token_ids(seed: int = 9) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, VOCAB, (WINDOWS, LENGTH))


def probabilities(values: NDArray[np.float32]) -> NDArray[np.float64]:
    exponentials = np.exp(values.astype(np.float64))
    return exponentials / exponentials.sum(-1, keepdims=True)


def test_figures_are_those_of_the_formulas() -> None:
    source, ids = logits(0), token_ids()
    model = source + 0.3 * logits(1, 1.0)
    p, q = probabilities(source), probabilities(model)
    kl = (p * np.log(p / q)).sum(-1).ravel()
    nll = [-np.log(q[w, t, ids[w, t + 1]]) for w in range(WINDOWS) for t in range(LENGTH - 1)]
    found = compare(source, model, ids)
    assert found.tokens == WINDOWS * LENGTH
    assert found.mean_kl == pytest.approx(kl.mean(), rel=1e-9)
    assert found.p99_kl == pytest.approx(np.quantile(kl, 0.99), rel=1e-9)
    assert found.same_top1 == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean())
    assert 0 < found.same_top1 < 1
    assert found.perplexity == pytest.approx(np.exp(np.mean(nll)), rel=1e-9)


def test_it_is_the_source_that_expectations_are_over() -> None:
    source, model, ids = logits(0), logits(1), token_ids()
    p, q = probabilities(source), probabilities(model)
    assert compare(source, model, ids).mean_kl == pytest.approx((p * np.log(p / q)).sum(-1).mean())
    assert compare(model, source, ids).mean_kl == pytest.approx((q * np.log(q / p)).sum(-1).mean())


def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(17, 100\), those of the source \(17, 101\)"):
        compare(logits(0), logits(1)[:, :, :-1], token_ids())


def test_logits_that_are_not_finite_are_no_result() -> None:
    model = logits(1)
    model[1, 2, 3] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        compare(logits(0), model, token_ids())


def test_windows_come_back_as_they_were_written() -> None:
    written = logits(4)
    stream = io.BytesIO(json.dumps({"vocab": VOCAB}).encode() + b"\n" + written.tobytes())
    for found, window in zip(read_logits(stream, token_ids()), written, strict=True):
        np.testing.assert_array_equal(found, window)


@pytest.mark.parametrize("kept", [0, 20, -4])
def test_logits_that_end_early_are_an_error(kept: int) -> None:
    whole = json.dumps({"vocab": VOCAB}).encode() + b"\n" + logits(4).tobytes()
    with pytest.raises(EOFError, match="of 3"):
        list(read_logits(io.BytesIO(whole[:kept]), token_ids()))

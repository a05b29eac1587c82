"""Text of the model itself, and random tokens."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from inferencex.convert.calibrate.self_text import random_windows, sampled_windows
from inferencex.formats.errors import QuantizationError

TOKENS = np.arange(10, 60)


def _count_up(starts: NDArray[np.int64], length: int, seed: int) -> NDArray[np.int64]:
    return np.concatenate([starts, starts[:, -1:] + 1 + np.arange(length - starts.shape[1])], axis=1)


def test_windows_are_what_the_model_says() -> None:
    windows = sampled_windows(_count_up, [1], TOKENS, 40, 8, seed=5)
    assert windows.shape == (40, 8)
    assert windows.dtype == np.int64
    assert (windows[:, 0] == 1).all()
    assert set(windows[:, 1].tolist()) <= set(TOKENS.tolist())
    assert len(set(windows[:, 1].tolist())) > 10
    assert np.array_equal(windows, sampled_windows(_count_up, [1], TOKENS, 40, 8, seed=5))
    assert not np.array_equal(windows, sampled_windows(_count_up, [1], TOKENS, 40, 8, seed=6))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda starts, length, seed: _count_up(starts, length, seed)[:-1], r"int64 \[2, 8\], expected .*\[3, 8\]"),
        (lambda starts, length, seed: _count_up(starts, length, seed) * 1.0, "float64"),
        (lambda starts, length, seed: _count_up(starts, length, seed) + 1, "does not begin"),
    ],
)
def test_samplers_that_break_their_contract(wrong: object, message: str) -> None:
    with pytest.raises(QuantizationError, match=message):
        sampled_windows(wrong, [], TOKENS, 3, 8, seed=0)  # type: ignore[arg-type]


def test_random_tokens() -> None:
    windows = random_windows([1, 2], TOKENS, 30, 50, seed=1)
    assert windows.shape == (30, 50)
    assert (windows[:, :2] == [1, 2]).all()
    assert set(windows[:, 2:].reshape(-1).tolist()) == set(TOKENS.tolist())

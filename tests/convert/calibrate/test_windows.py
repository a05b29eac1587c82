"""Windows of a text: all over it, never overlapping, the same for the same seed."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from inferencex.convert.calibrate.windows import choose_windows


@given(
    length=st.integers(1, 40),
    samples=st.integers(1, 40),
    held_out=st.integers(0, 20),
    spare=st.integers(0, 500),
    seed=st.integers(0, 1 << 62),
)
def test_windows_lie_inside_and_apart(length: int, samples: int, held_out: int, spare: int, seed: int) -> None:
    tokens = samples * length + spare
    chosen = choose_windows(tokens, length, samples, held_out, seed)
    assert len(chosen.calibration) == samples
    assert len(chosen.held_out) == min(held_out, tokens // length - samples)
    starts = np.sort(np.concatenate([chosen.calibration, chosen.held_out]))
    assert starts[0] >= 0
    assert starts[-1] + length <= tokens
    assert (np.diff(starts) >= length).all()


def test_every_part_of_a_long_text_is_looked_at() -> None:
    tokens = 100_000
    chosen = choose_windows(tokens, 10, 20, 10, seed=3)
    assert np.array_equal(chosen.calibration // (tokens // 20), np.arange(20))
    assert np.array_equal(chosen.held_out // (tokens // 10), np.arange(10))


def test_the_seed_decides() -> None:
    one, again, other = (choose_windows(10_000, 10, 20, 5, seed) for seed in (1, 1, 2))
    assert np.array_equal(one.calibration, again.calibration)
    assert np.array_equal(one.held_out, again.held_out)
    assert not np.array_equal(one.calibration, other.calibration)

"""Tokens per second, from looks at a count."""

from __future__ import annotations

import pytest

from inferencex.runtime.server.telemetry.rates import Rate


def test_a_rate_is_that_of_the_last_ten_seconds() -> None:
    now = 100.0
    rate = Rate(lambda: now)
    assert rate.per_second(50) == 0.0
    now = 102.0
    assert rate.per_second(150) == 50.0
    now = 102.1  # too soon to leave a mark
    assert rate.per_second(150) == pytest.approx(100 / 2.1)
    for second in range(103, 120):
        now = float(second)
        last = rate.per_second(150)
    assert last == 0.0


def test_looking_again_after_long_spans_that_time() -> None:
    now = 0.0
    rate = Rate(lambda: now)
    rate.per_second(0)
    now = 60.0
    assert rate.per_second(600) == 10.0


def test_a_count_that_began_anew_is_no_negative_rate() -> None:
    now = 0.0
    rate = Rate(lambda: now)
    rate.per_second(500)
    now = 1.0
    assert rate.per_second(3) == 0.0

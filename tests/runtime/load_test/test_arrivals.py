from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from inferencex.formats.errors import OptionError
from inferencex.runtime.load_test.arrivals import evenly, parse_concurrencies, parse_rates, poisson


def test_equal_gaps() -> None:
    assert [*itertools.islice(evenly(4), 5)] == [0, 0.25, 0.5, 0.75, 1.0]


def test_gaps_of_a_poisson_process_have_the_mean_and_the_spread_of_its_rate() -> None:
    times = [*itertools.islice(poisson(5, random.Random(0)), 4000)]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[0] == 0 and min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.1)
    in_each_second = [sum(second <= time < second + 1 for time in times) for second in range(500)]
    assert statistics.variance(in_each_second) == pytest.approx(statistics.mean(in_each_second), rel=0.2)


def test_a_seed_repeats_the_times_and_another_does_not() -> None:
    first, again, other = ([*itertools.islice(poisson(3, random.Random(seed)), 50)] for seed in (7, 7, 8))
    assert first == again != other


def test_rates_and_concurrencies_are_numbers_or_lists() -> None:
    assert parse_rates("inf") == [math.inf]
    assert parse_rates("1,2.5, 4") == [1, 2.5, 4]
    assert parse_concurrencies("1,8, 32") == [1, 8, 32]


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "fast", "1,,2"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"^--rate .*expected"):
        parse_rates(text)


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "8;16"])
def test_what_is_no_concurrency_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"^--concurrency "):
        parse_concurrencies(text)

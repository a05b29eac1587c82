"""Choices of formats under a budget: never above it, the best there is, and no worse with more of it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferencex.convert.quantize.budget import FormatChoices, Option, undominated

OPTION = st.builds(Option, st.integers(1, 1 << 34), st.floats(0, 10))
WEIGHTS = st.dictionaries(st.sampled_from("abcdef"), st.lists(OPTION, min_size=1, max_size=6), min_size=1)
SMALL = st.dictionaries(
    st.sampled_from("abc"),
    st.lists(st.builds(Option, st.integers(1, 200), st.floats(0, 10)), min_size=1, max_size=4),
    min_size=1,
)


@settings(max_examples=60, deadline=None)
@given(WEIGHTS, st.integers(0, 1 << 36), st.integers(0, 1 << 36))
def test_choices_stay_within_bytes_and_more_of_them_are_never_worse(
    weights: dict[str, list[Option]], first: int, second: int
) -> None:
    choices = FormatChoices(weights)
    found = []
    for budget in sorted((first, second)):
        allocation = choices.within_bytes(budget)
        assert (allocation is None) == (budget < choices.smallest)
        if allocation is not None:
            assert allocation.nbytes <= budget
            assert allocation.nbytes == sum(weights[name][i].nbytes for name, i in allocation.chosen.items())
            assert list(allocation.chosen) == list(weights)
            found.append(allocation.rise)
    assert found == sorted(found, reverse=True) or found == pytest.approx(found[:1] * len(found))


@settings(max_examples=60, deadline=None)
@given(WEIGHTS, st.floats(0, 60))
def test_choices_stay_within_an_error_unless_none_does(weights: dict[str, list[Option]], limit: float) -> None:
    choices = FormatChoices(weights)
    allocation = choices.within_rise(limit)
    least = sum(min(option.rise for option in options) for options in weights.values())
    if allocation is None:
        assert least > limit - 1e-9
    else:
        assert allocation.rise <= limit + 1e-9
        assert choices.smallest <= allocation.nbytes <= choices.largest


@settings(max_examples=60, deadline=None)
@given(WEIGHTS, st.integers(0, 1 << 36))
def test_a_format_that_another_beats_is_never_chosen(weights: dict[str, list[Option]], budget: int) -> None:
    allocation = FormatChoices(weights).within_bytes(budget)
    for name, index in ({} if allocation is None else allocation.chosen).items():
        taken = weights[name][index]
        assert not any(
            (o.nbytes <= taken.nbytes and o.rise < taken.rise) or (o.nbytes < taken.nbytes and o.rise <= taken.rise)
            for o in weights[name]
        )


@settings(max_examples=60, deadline=None)
@given(SMALL, st.integers(3, 600))
def test_choices_are_the_best_of_all(weights: dict[str, list[Option]], budget: int) -> None:
    allocation = FormatChoices(weights).within_bytes(budget)
    every = [
        sum(o.rise for o in taken)
        for taken in itertools.product(*weights.values())
        if sum(o.nbytes for o in taken) <= budget
    ]
    assert (allocation is None) == (not every)
    if allocation is not None:
        assert allocation.rise == pytest.approx(min(every))


def test_the_smallest_choice_for_an_error_is_taken() -> None:
    choices = FormatChoices({"a": [Option(10, 4.0), Option(20, 1.0)], "b": [Option(10, 2.0), Option(30, 0.5)]})
    smallest = choices.within_rise(3.0)
    assert smallest is not None
    assert (smallest.chosen, smallest.nbytes, smallest.rise) == ({"a": 1, "b": 0}, 30, 3.0)
    assert choices.within_rise(1.4) is None
    assert (choices.best.nbytes, choices.best.rise) == (50, 1.5)
    assert (choices.smallest, choices.largest) == (20, 50)


def test_options_are_sorted_by_size_and_beaten_ones_left_out() -> None:
    options = [Option(30, 1.0), Option(10, 3.0), Option(20, 3.0), Option(10, 4.0), Option(40, 1.0)]
    assert undominated(options) == [1, 0]

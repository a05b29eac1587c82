"""The order of prompts: leaders of contexts first, everything once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferencex.recipes.evaluation.prefix_order import prefix_order


def test_leaders_go_before_followers_of_as_many_contexts_as_fit() -> None:
    prompts = [[1, 2, 7], [1, 2, 8], [3, 4, 7], [3, 4, 8], [5, 6, 7], [5, 6, 8]]
    assert prefix_order(prompts, [2] * 6, 6) == [0, 2, 1, 3, 4, 5]
    assert prefix_order(prompts, [2] * 6, 1000) == [0, 2, 4, 1, 3, 5]
    assert prefix_order(prompts, [2] * 6, 0) == [0, 1, 2, 3, 4, 5]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=12), st.integers(0, 20))
def test_everything_comes_once(prompts: list[list[int]], at_once: int) -> None:
    order = prefix_order(prompts, [len(prompt) - 1 for prompt in prompts], at_once)
    assert sorted(order) == list(range(len(prompts)))

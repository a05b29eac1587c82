from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencex.formats.errors import RequestError
from inferencex.runtime.text import StopMatcher

letters = st.text(alphabet="ab<", max_size=30)
stops = st.lists(st.text(alphabet="ab<", min_size=1, max_size=5), max_size=4)


def search(text: str, stop: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: the stop string complete first, the longest of those complete at the same character."""
    for end in range(1, len(text) + 1):
        found = [entry for entry in stop if text[:end].endswith(entry)]
        if found:
            longest = max(found, key=len)
            return (text[:end] if include else text[: end - len(longest)]), longest
    return text, None


def feed(matcher: StopMatcher, pieces: list[str]) -> str:
    return "".join([matcher.push(piece) for piece in pieces] + [matcher.flush()])


@given(text=letters, stop=stops, include=st.booleans(), cuts=st.lists(st.integers(0, 30)))
def test_any_cutting_equals_a_search_of_the_whole(text: str, stop: list[str], include: bool, cuts: list[int]) -> None:
    marks = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(marks)]
    matcher = StopMatcher(stop, include)
    assert (feed(matcher, pieces), matcher.matched) == search(text, stop, include)


@given(text=letters, stop=stops)
def test_only_a_beginning_of_a_stop_string_is_held_back(text: str, stop: list[str]) -> None:
    matcher = StopMatcher(stop)
    out = ""
    for end, character in enumerate(text, start=1):
        out += matcher.push(character)
        if matcher.matched is not None:
            break
        held = text[len(out) : end]
        beginnings = {entry[:length] for entry in stop for length in range(len(entry))} | {""}
        longest = max((part for part in beginnings if text[:end].endswith(part)), key=len)
        assert held == longest


def test_split_across_pieces_and_released_at_the_end() -> None:
    matcher = StopMatcher(["</answer>", "User:"])
    pieces = ["Hi</ans", "!", " Us", "</an", "swer", "> more"]
    assert [matcher.push(piece) for piece in pieces] == ["Hi", "</ans!", " ", "Us", "", ""]
    assert matcher.matched == "</answer>"
    assert matcher.flush() == ""

    matcher = StopMatcher(["User:"])
    assert matcher.push("the Use") == "the "
    assert matcher.flush() == "Use"
    assert matcher.matched is None


def test_overlapping_stop_strings() -> None:
    for stop, text, expected, matched in (
        (["ab", "abc"], "xabc", "x", "ab"),
        (["c", "bc"], "abc", "a", "bc"),
        (["bcd", "abcde"], "abcde", "a", "bcd"),
        (["aab"], "aaab", "a", "aab"),
    ):
        matcher = StopMatcher(stop)
        assert feed(matcher, [text]) == expected
        assert matcher.matched == matched


def test_nothing_passes_after_a_match() -> None:
    matcher = StopMatcher(["x"], include_stop=True)
    assert matcher.push("axb") == "ax"
    assert matcher.push("more") == ""


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match=r"stop\[1\] is empty"):
        StopMatcher(["a", ""])

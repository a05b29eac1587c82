from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencex.runtime.load_test.sse import EventSplitter

STREAM = (
    b": comment\n\ndata: one\n\nevent: x\nid: 1\ndata:two\n\ndata: a\ndata:  b\n\ndata\n\nretry: 5\n\ndata: [DONE]\n\n"
)
EVENTS = [b"one", b"two", b"a\n b", b"", b"[DONE]"]


def events(*pieces: bytes) -> list[bytes]:
    splitter = EventSplitter()
    return [event for piece in pieces for event in splitter.feed(piece)]


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
def test_a_stream_cut_in_two_at_any_byte_has_the_same_events(ending: bytes) -> None:
    stream = STREAM.replace(b"\n", ending)
    stream += b"\n" if ending == b"\r" else b""  # until then it may be half of a CR LF
    for place in range(len(stream) + 1):
        assert events(stream[:place], stream[place:]) == EVENTS, place


@given(cuts=st.lists(st.integers(0, len(STREAM) * 2), max_size=20), ending=st.sampled_from([b"\n", b"\r\n"]))
def test_a_stream_cut_into_many_pieces_has_the_same_events(cuts: list[int], ending: bytes) -> None:
    stream = STREAM.replace(b"\n", ending)
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    assert events(*(stream[a:b] for a, b in itertools.pairwise(places))) == EVENTS


def test_an_event_that_has_not_ended_is_held_back() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: one\n\ndata: tw") == [b"one"]
    assert splitter.feed(b"o\n") == []
    assert splitter.feed(b"\n") == [b"two"]

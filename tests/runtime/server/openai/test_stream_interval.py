"""Streams whose pieces have several tokens say the same, in fewer pieces."""

from __future__ import annotations

from typing import Any

import pytest

from inferencex.runtime.server.service import ServiceLimits
from tests.runtime.server.openai.serving import MODEL, Serve, Served

BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 22, "ignore_eos": True, "logprobs": 1, "n": 2, "seed": 3}


def _streamed(served: Serve, interval: int, **more: Any) -> dict[int, list[dict[str, Any]]]:
    """The pieces of each choice."""
    pieces: dict[int, list[dict[str, Any]]] = {}

    async def scenario(server: Served) -> None:
        for event in await server.events("/v1/completions", {**BODY, **more}):
            for choice in event["choices"]:
                pieces.setdefault(choice["index"], []).append(choice)

    served(scenario, limits=ServiceLimits(stream_interval=interval))
    return pieces


def _tokens(piece: dict[str, Any]) -> list[str]:
    found: list[str] = (piece["logprobs"] or {}).get("tokens", [])
    return found


@pytest.mark.parametrize("interval", [2, 5, 100])
@pytest.mark.parametrize("more", [{}, {"temperature": 1.0}, {"max_tokens": 1}], ids=["greedy", "sampled", "one token"])
def test_the_same_is_said_in_fewer_pieces(served: Serve, interval: int, more: dict[str, Any]) -> None:
    one_by_one, together = _streamed(served, 1, **more), _streamed(served, interval, **more)
    assert together.keys() == one_by_one.keys() == {0, 1}
    for index, pieces in together.items():
        alone = one_by_one[index]
        assert "".join(piece["text"] for piece in pieces) == "".join(piece["text"] for piece in alone)
        assert [token for piece in pieces for token in _tokens(piece)] == [t for piece in alone for t in _tokens(piece)]
        assert pieces[-1]["finish_reason"] == alone[-1]["finish_reason"] == "length"
        counts = [len(_tokens(piece)) for piece in pieces if _tokens(piece)]
        assert counts[0] == 1, "the first token does not wait"
        assert all(count >= interval for count in counts[1:-1])
        assert len(pieces) <= len(alone)


def test_chats_stream_in_larger_pieces_too(served: Serve) -> None:
    async def scenario(server: Served) -> None:
        server.say("the cat sat on the mat and the dog saw that the cat sat there")
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 200}
        events = await server.events("/v1/chat/completions", body)
        deltas = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
        assert "".join(deltas) == "the cat sat on the mat and the dog saw that the cat sat there"
        assert len([delta for delta in deltas if delta]) < 12

    served(scenario, limits=ServiceLimits(stream_interval=8))

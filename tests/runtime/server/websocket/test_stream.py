"""Generations over a socket: several at once, cancelled, and left behind."""

from __future__ import annotations

import asyncio
import random
from functools import partial

import pytest

from inferencex.runtime import LLM, SamplingParams
from inferencex.runtime.server.websocket import routes
from inferencex.runtime.server.websocket.session import SessionLimits
from tests.runtime.server.websocket.client import Scene, converse, endless, joined, prompt

PROMPTS = {"a": "once upon", "b": "Größe, naïve", "c": "東京", "d": "1234567890"}


def test_several_generations_on_one_socket(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    expected = dict(zip(PROMPTS, llm.generate(list(PROMPTS.values()), params), strict=True))

    async def scenario(scene: Scene) -> None:
        async with scene.socket(**{"X-Request-Id": "mine"}) as socket:
            assert socket.accepted is not None and socket.accepted["x-request-id"] == "mine"
            for name, text in PROMPTS.items():
                socket.say(id=name, **prompt(text, max_tokens=24, ignore_eos=True))
            heard = []
            while sum(message["type"] == "done" for message in heard) < len(PROMPTS):
                heard.append(await socket.hear())
            for name, output in expected.items():
                own = [message for message in heard if message["id"] == name]
                kinds = [message["type"] for message in own]
                assert kinds == ["accepted", *["delta"] * (len(kinds) - 2), "done"]
                assert joined(heard, name) == output.outputs[0].text
                assert own[0]["model"] == "tiny" and own[0]["request_id"].startswith("mine-")
                assert own[-2]["choices"][0]["finish_reason"] == "length"
                assert own[-1]["usage"]["completion_tokens"] == 24
            assert len({message["request_id"] for message in heard if message["type"] == "accepted"}) == len(PROMPTS)
            first_done = next(place for place, message in enumerate(heard) if message["type"] == "done")
            assert {message["id"] for message in heard[:first_done]} == set(PROMPTS)  # side by side

    converse(llm, scenario)


def test_a_chat(llm: LLM) -> None:
    [expected] = llm.chat([{"role": "user", "content": "hello"}], SamplingParams(temperature=0.0, max_tokens=8))

    async def scenario(scene: Scene) -> None:
        async with scene.socket() as socket:
            messages = [{"role": "user", "content": "hello"}]
            socket.say(type="chat", id="c", messages=messages, temperature=0, max_tokens=8, stream=False)
            heard = await socket.hear_until("done", "c")
            assert joined(heard, "c") == expected.outputs[0].text
            assert heard[1]["choices"][0]["delta"]["role"] == "assistant"

    converse(llm, scenario)


def test_several_prompts_in_one_message(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8)
    expected = llm.generate(["once", "twice"], params)

    async def scenario(scene: Scene) -> None:
        async with scene.socket() as socket:
            socket.say(id="g", **{**prompt(), "prompt": ["once", "twice"]})
            heard = await socket.hear_until("done", "g")
            assert [joined(heard, "g", index) for index in (0, 1)] == [each.outputs[0].text for each in expected]

    converse(llm, scenario)


def test_a_cancelled_generation_says_nothing_more(llm: LLM) -> None:
    async def scenario(scene: Scene) -> None:
        async with scene.socket() as socket:
            socket.say(id="long", **endless())
            await socket.hear_until("delta", "long")
            assert scene.service.num_running == 1
            socket.say(type="cancel", id="long")
            await socket.hear_until("cancelled", "long")
            assert await scene.service.drained(30)
            assert llm.stats.kv_blocks_used == 0
            socket.say(id="long", **prompt())  # the id is free again
            heard = await socket.hear_until("done", "long")
            assert [message["type"] for message in heard[:2]] == ["accepted", "delta"]

    aborted = llm.stats.num_aborted_requests
    converse(llm, scenario)
    assert llm.stats.num_aborted_requests == aborted + 1


def test_cancelling_before_it_began(llm: LLM) -> None:
    async def scenario(scene: Scene) -> None:
        async with scene.socket() as socket:
            for _ in range(20):
                socket.say(id="x", **endless())
                socket.say(type="cancel", id="x")
                await socket.hear_until("cancelled", "x")

    converse(llm, scenario)


def test_a_disconnect_ends_everything_at_once(llm: LLM) -> None:
    async def scenario(scene: Scene) -> None:
        async with scene.socket() as other:
            other.say(id="other", **prompt(max_tokens=200, ignore_eos=True))
            socket = scene.socket()
            await socket.__aenter__()
            for name in ("a", "b", "c"):
                socket.say(id=name, **endless())
            for name in ("a", "b", "c"):
                await socket.hear_until("delta", name)
            await socket.leave()
            done = await other.hear_until("done", "other")
            assert done[-1]["usage"]["completion_tokens"] == 200
            assert await scene.service.drained(30)

    aborted = llm.stats.num_aborted_requests
    converse(llm, scenario)
    assert llm.stats.num_aborted_requests == aborted + 3


def test_sockets_left_at_random_points(llm: LLM) -> None:
    choose = random.Random(5)

    async def visit(scene: Scene) -> None:
        async with scene.socket() as socket:
            for name in range(choose.randrange(1, 4)):
                socket.say(id=str(name), **endless(n=1))
            for _ in range(choose.randrange(6)):
                await socket.hear()
            if choose.random() < 0.5:
                socket.say(type="cancel", id="0")

    async def scenario(scene: Scene) -> None:
        for _ in range(5):
            await asyncio.gather(*(visit(scene) for _ in range(8)))
        assert await scene.service.drained(30)
        async with scene.socket() as socket:
            socket.say(id="after", **prompt())
            await socket.hear_until("done", "after")

    converse(llm, scenario)


def test_a_reader_that_stops_reading_is_put_off_and_nobody_else_waits(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "SessionLimits", partial(SessionLimits, max_unread=30_000, close_seconds=0.05))

    async def scenario(scene: Scene) -> None:
        async with scene.socket() as slow, scene.socket() as brisk:
            slow.say(id="slow", **endless())
            await slow.hear_until("delta", "slow")
            slow.reading.clear()
            brisk.say(id="brisk", **prompt(max_tokens=300, ignore_eos=True))
            await brisk.hear_until("done", "brisk")
            assert await scene.service.drained(30)  # the slow one's was ended

    aborted = llm.stats.num_aborted_requests
    converse(llm, scenario)
    assert llm.stats.num_aborted_requests == aborted + 1


def test_a_server_that_drains_finishes_what_runs(llm: LLM) -> None:
    async def scenario(scene: Scene) -> None:
        async with scene.socket() as socket:
            socket.say(id="a", **prompt(max_tokens=100, ignore_eos=True))
            await socket.hear_until("delta", "a")
            scene.service.begin_drain()
            socket.say(id="b", **prompt())
            heard = await socket.hear_until("error", "b")
            assert heard[-1]["error"]["code"] == "shutting_down" and heard[-1]["retry_after"] > 0
            if not any(message["type"] == "done" for message in heard):
                await socket.hear_until("done", "a")

    converse(llm, scenario)


def test_ending_everything_is_told(llm: LLM) -> None:
    async def scenario(scene: Scene) -> None:
        async with scene.socket() as socket:
            socket.say(id="a", **endless())
            await socket.hear_until("delta", "a")
            scene.service.end_all()
            heard = await socket.hear_until("error", "a")
            assert heard[-1]["error"]["code"] == "shutting_down"
            socket.say(type="ping", id="still here")
            assert await socket.hear() == {"type": "pong", "id": "still here"}

    converse(llm, scenario)

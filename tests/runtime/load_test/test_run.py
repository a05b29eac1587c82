"""Requests against a scripted server: how many, when, how many at a time, and what becomes of failures."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from inferencex.runtime.load_test.api import RequestShape
from inferencex.runtime.load_test.connection import HttpClient, Origin
from inferencex.runtime.load_test.prompts import Prompt
from inferencex.runtime.load_test.run import LoadRun, Measurement
from tests.runtime.load_test.fake_server import FakeServer, Reply, event, failed, plain, streamed, token

Serve = Callable[..., FakeServer]


def prompts(count: int | None, max_tokens: int = 3) -> Iterator[Prompt]:
    numbers = itertools.count() if count is None else range(count)
    return (Prompt([5, 6, number], 3, max_tokens) for number in numbers)


def at_concurrency(
    url: str,
    count: int | None,
    concurrency: int,
    *,
    stream: bool = True,
    timeout: float = 20.0,
    duration: float | None = None,
) -> Measurement:
    async def run() -> Measurement:
        client = HttpClient(Origin.parse(url))
        try:
            load = LoadRun(client, RequestShape("tiny", stream=stream), prompts(count), timeout)
            return await load.at_concurrency(concurrency, duration)
        finally:
            client.close()

    return asyncio.run(run())


def at_times(
    url: str, arrivals: list[float], count: int, concurrency: int | None = None, **options: Any
) -> Measurement:
    async def run() -> Measurement:
        client = HttpClient(Origin.parse(url))
        try:
            return await LoadRun(client, RequestShape("tiny"), prompts(count), 20.0).at_times(
                iter(arrivals), concurrency, **options
            )
        finally:
            client.close()

    return asyncio.run(run())


@pytest.mark.parametrize("stream", [True, False])
def test_every_prompt_is_asked_once(serve: Serve, stream: bool) -> None:
    server = serve()
    run = at_concurrency(server.url, 10, 4, stream=stream)
    assert sorted(body["prompt"][2] for body in server.bodies) == [*range(10)]
    assert all(record.ok and record.output_tokens == 3 and record.prompt_tokens == 3 for record in run.records)
    assert {len(record.arrivals) for record in run.records} == {3 if stream else 0}
    assert 1 < run.peak <= 4 and server.most_at_once <= 4
    assert server.connections <= 4, "connections are used again"
    assert all(record.due <= record.sent < record.ended for record in run.records)
    assert run.began == min(record.sent for record in run.records)
    assert run.ended == max(record.ended for record in run.records)


def test_what_is_asked(serve: Serve) -> None:
    server = serve()
    at_concurrency(server.url, 1, 1)
    expected = {"model": "tiny", "prompt": [5, 6, 0], "max_tokens": 3, "temperature": 0.0, "stream": True}
    assert server.bodies == [{**expected, "stream_options": {"include_usage": True}}]


def test_one_at_a_time_is_one_after_the_other(serve: Serve) -> None:
    run = at_concurrency(serve().url, 5, 1)
    assert run.peak == 1
    for before, after in itertools.pairwise(run.records):
        assert before.ended <= after.sent


def test_a_duration_ends_the_sending_and_not_the_answers(serve: Serve) -> None:
    run = at_concurrency(serve().url, None, 3, duration=0.05)
    assert len(run.records) >= 3 and all(record.ok for record in run.records)
    assert max(record.sent for record in run.records) - run.began < 5


def test_requests_are_sent_at_their_times(serve: Serve) -> None:
    arrivals = [0.0, 0.02, 0.02, 0.05]
    run = at_times(serve().url, arrivals, 4)
    assert [record.due - run.records[0].due for record in run.records] == pytest.approx(arrivals)
    assert all(record.sent >= record.due for record in run.records)


def test_a_limit_makes_those_wait_that_are_due(serve: Serve) -> None:
    server = serve()
    run = at_times(server.url, [0.0] * 6, 6, concurrency=2)
    assert run.peak == 2 and server.most_at_once <= 2
    assert len(server.bodies) == 6


def test_a_duration_leaves_out_later_times(serve: Serve) -> None:
    assert len(at_times(serve().url, [0.0, 0.01, 0.5, 9.0], 4, duration=0.02).records) == 2


def test_failures_are_told_apart_and_do_not_end_the_run(serve: Serve) -> None:
    def answer(body: dict[str, Any]) -> Reply:
        broken = Reply(pieces=[event(token("a"))], chunked=True, close=True)
        cases = (
            failed(503, "later"),
            streamed([token("a"), '{"error": {"message": "broke"}}']),
            broken,
            streamed([token("a")], done=False),
            Reply(pieces=[b"data: nonsense\n\n"]),
        )
        number: int = body["prompt"][2]
        return cases[number] if number < len(cases) else plain(body)

    run = at_concurrency(serve(answer=answer).url, 7, 1)
    kinds = ["http 503", "stream", "disconnect", "incomplete", "protocol", None, None]
    assert [record.error for record in run.records] == kinds
    assert run.records[0].message == "later"


def test_a_connection_that_the_server_closed_while_idle_is_replaced(serve: Serve) -> None:
    server = serve(answer=lambda body: Reply(**{**vars(plain(body)), "close": True, "chunked": False}))
    run = at_concurrency(server.url, 4, 1, stream=False)
    assert [record.error for record in run.records] == [None] * 4
    assert server.connections == 4


def test_an_answer_that_takes_too_long_is_a_failure(serve: Serve) -> None:
    silent = Reply(pieces=[event(token("a"))], chunked=True)
    server = serve(answer=lambda body: Reply(**{**vars(silent), "pieces": Endless()}))
    run = at_concurrency(server.url, 1, 1, timeout=0.1)
    assert [record.error for record in run.records] == ["timeout"]
    assert run.records[0].message == "no complete answer within 0.1 s"


class Endless(list[bytes]):
    """Pieces of a stream without end."""

    def __iter__(self) -> Iterator[bytes]:
        return itertools.repeat(event(token("a")))


def test_a_server_that_is_not_there(serve: Serve) -> None:
    run = at_concurrency("http://127.0.0.1:9", 2, 1)
    assert [record.error for record in run.records] == ["connect"] * 2


def test_what_is_not_http_is_a_failure() -> None:
    async def run() -> Measurement:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"SSH-2.0-OpenSSH\r\n")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        client = HttpClient(Origin("127.0.0.1", server.sockets[0].getsockname()[1], "", False))
        async with server:
            return await LoadRun(client, RequestShape("tiny"), prompts(1), 20.0).at_concurrency(1)

    assert [record.error for record in asyncio.run(run()).records] == ["protocol"]

"""One server under the load, streamed and not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

from bench.serve.load import Load, prompts
from bench.serve.results import Served
from bench.serve.servers import Server
from inferencex.runtime.load_test.api import RequestShape
from inferencex.runtime.load_test.connection import HttpClient, Origin
from inferencex.runtime.load_test.prompts import Prompt
from inferencex.runtime.load_test.run import LoadRun
from inferencex.runtime.load_test.statistics import Load as Offered
from inferencex.runtime.load_test.statistics import Result, summarize


class IncompleteError(Exception):
    """Requests failed, so the figures would be of less work than was asked for."""


def measure_server(server: Server, origin: Origin, load: Load, tokenizer: Path, timeout: float) -> list[Served]:
    """Return the figures of every repetition, streamed and not in turn; IncompleteError when a request fails.

    A wave of as many requests as are under way at once goes before each way, uncounted.
    """
    batches = prompts(load, tokenizer, as_text=server.as_text, seed="served")
    found: list[Served] = []
    for stream in (True, False):
        warm_up = next(batches)[: load.concurrency]
        asyncio.run(_one(origin, server.shape(load, stream), iter(warm_up), load, timeout))
    began = time.monotonic()
    for repetition in range(load.repeat):
        if repetition and time.monotonic() - began > load.seconds:
            break
        for stream in (True, False):
            result = asyncio.run(_one(origin, server.shape(load, stream), iter(next(batches)), load, timeout))
            found.append(_served(result, stream))
    return found


async def _one(origin: Origin, shape: RequestShape, batch: Iterator[Prompt], load: Load, timeout: float) -> Result:
    client = HttpClient(origin)
    try:
        run = await LoadRun(client, shape, batch, timeout).at_concurrency(load.concurrency)
    finally:
        client.close()
    result = summarize(Offered(None, load.concurrency), run, ())
    if result.errors:
        kind, message = next(iter(result.examples.items()))
        raise IncompleteError(f"{sum(result.errors.values())} of {result.requests} requests failed: {kind} ({message})")
    return result


def _served(result: Result, stream: bool) -> Served:
    first, gap = result.time_to_first_token, result.inter_token_latency
    latency = result.latency
    assert latency is not None
    return Served(
        stream=stream,
        output_tokens_per_second=result.output_tokens_per_second,
        prompt_tokens=result.prompt_tokens / result.completed,
        output_tokens=result.output_tokens / result.completed,
        first_token_p50=None if first is None else first.p50,
        first_token_p99=None if first is None else first.p99,
        gap_p50=None if gap is None else gap.p50,
        gap_p99=None if gap is None else gap.p99,
        latency_p50=latency.p50,
        client_share=result.client_seconds / result.seconds,
    )

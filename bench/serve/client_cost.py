"""What the load generator itself costs: `python -m bench.serve.client_cost`.

A server that computes nothing, in a process of its own, writes a token to every stream at once, as an engine's step
does, at a steady pace. Processor time of the load generator is printed for each token of it.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Annotated

import typer

from bench.run import ROOT
from inferencex.runtime.load_test.api import RequestShape
from inferencex.runtime.load_test.connection import HttpClient, Origin
from inferencex.runtime.load_test.prompts import Prompt
from inferencex.runtime.load_test.run import LoadRun
from inferencex.runtime.load_test.statistics import Load, Result, summarize

_CHOICE = {"index": 0, "text": " word", "logprobs": None, "finish_reason": None}
_EVENT = {"id": "cmpl-" + "0" * 32, "object": "text_completion", "created": 1700000000, "model": "m"}


def _chunk(event: str) -> bytes:
    data = f"data: {event}\n\n".encode()
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


class _Server:
    """Streams `tokens` events to each connection that sent a request."""

    def __init__(self, tokens: int, pace: float) -> None:
        self._tokens, self._pace = tokens, pace
        self._streams: dict[asyncio.StreamWriter, int] = {}

    async def run(self) -> None:
        server = await asyncio.start_server(self._read, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        token = _chunk(json.dumps({**_EVENT, "choices": [_CHOICE]}))
        last = json.dumps({**_EVENT, "choices": [{**_CHOICE, "text": "", "finish_reason": "length"}]})
        end = _chunk(last) + _chunk("[DONE]") + b"0\r\n\r\n"
        while True:
            await asyncio.sleep(self._pace)
            for writer, left in list(self._streams.items()):
                writer.write(token if left else end)
                self._streams[writer] -= 1
                if not left:
                    del self._streams[writer]

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
                )
                self._streams[writer] = self._tokens
        except asyncio.IncompleteReadError:
            writer.close()


async def _measure(port: int, concurrency: int, requests: int, tokens: int) -> Result:
    client = HttpClient(Origin("127.0.0.1", port, "", False))
    prompts = [Prompt([*range(128)], 128, tokens) for _ in range(requests)]
    run = await LoadRun(client, RequestShape("m"), iter(prompts), 600.0).at_concurrency(concurrency)
    client.close()
    return summarize(Load(None, concurrency), run, ())


def client_cost(
    concurrency: Annotated[int, typer.Option(min=1, help="Streams at a time.")] = 32,
    requests: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 128,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each stream.")] = 128,
    pace: Annotated[float, typer.Option(help="Seconds between tokens of a stream.")] = 0.01,
    serve: Annotated[bool, typer.Option("--serve", hidden=True)] = False,
) -> None:
    """Print the processor time that the load generator takes for each token that it reads."""
    if serve:
        asyncio.run(_Server(tokens, pace).run())
        return
    command = [sys.executable, "-m", "bench.serve.client_cost", "--serve"]
    with subprocess.Popen(
        [*command, "--tokens", str(tokens), "--pace", str(pace)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as server:
        try:
            assert server.stdout is not None
            result = asyncio.run(_measure(int(server.stdout.readline()), concurrency, requests, tokens))
        finally:
            server.terminate()
    cost = result.client_seconds / result.output_tokens
    print(
        f"{1e6 * cost:.1f} µs a token, {result.client_seconds / result.seconds:.1%} of a processor at "
        f"{result.output_tokens_per_second:.0f} tokens/s in {concurrency} streams"
    )


if __name__ == "__main__":
    typer.run(client_cost)

"""The socket as a web server serves it, with a client of another make."""

from __future__ import annotations

import asyncio
import json
import socket as sockets

import pytest
import uvicorn
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError, InvalidStatus

from inferencex.runtime import LLM, SamplingParams
from tests.runtime.server.websocket.client import Scene, converse, endless, prompt


class Server(uvicorn.Server):
    """Tells when it listens."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(uvicorn.Config(scene.app, log_level="warning", lifespan="off", ws_max_size=4096))
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[sockets.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


class Listening:
    """A web server while the `async with` runs; gives the address."""

    def __init__(self, scene: Scene) -> None:
        self._server = Server(scene)
        self._socket = sockets.socket()

    async def __aenter__(self) -> str:
        self._socket.bind(("127.0.0.1", 0))
        self._task = asyncio.create_task(self._server._serve([self._socket]))
        await self._server.listening.wait()
        return f"ws://127.0.0.1:{self._socket.getsockname()[1]}/v1/stream"

    async def __aexit__(self, *exc: object) -> None:
        self._server.should_exit = True
        await self._task


def test_a_generation_over_the_network(llm: LLM) -> None:
    [expected] = llm.generate("Größe", SamplingParams(temperature=0.0, max_tokens=24))

    async def scenario(scene: Scene) -> None:
        async with Listening(scene) as address, connect(address) as client:
            await client.send(json.dumps({"id": "g", **prompt("Größe", max_tokens=24)}))
            text, message = "", {"type": ""}
            while message["type"] != "done":
                message = json.loads(await client.recv())
                text += "".join(choice["text"] for choice in message.get("choices", ()))
            assert text == expected.outputs[0].text

    converse(llm, scenario)


def test_a_connection_that_breaks_off(llm: LLM) -> None:
    async def scenario(scene: Scene) -> None:
        async with Listening(scene) as address:
            client = await connect(address)
            await client.send(json.dumps({"id": "g", **endless()}))
            await client.recv()
            client.transport.abort()
            assert await scene.service.drained(30)

    converse(llm, scenario)
    assert llm.stats.kv_blocks_used == 0


def test_frames_that_are_too_large_and_origins_that_are_not_ours(llm: LLM) -> None:
    async def scenario(scene: Scene) -> None:
        async with Listening(scene) as address:
            async with connect(address) as client:
                await client.send("x" * 10_000)
                with pytest.raises(ConnectionClosedError) as caught:
                    await client.recv()
                assert caught.value.rcvd is not None and caught.value.rcvd.code == 1009
            with pytest.raises(InvalidStatus) as refused:
                await connect(address, origin="https://elsewhere.example")  # type: ignore[arg-type]
            assert refused.value.response.status_code == 403

    converse(llm, scenario)

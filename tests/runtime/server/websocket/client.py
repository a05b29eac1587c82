"""A client on the other side of the application's WebSocket, without a network in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self

from fastapi import FastAPI

from inferencex.runtime import LLM
from inferencex.runtime.server import websocket
from inferencex.runtime.server.access.keys import KeyStore
from inferencex.runtime.server.app import create_app
from inferencex.runtime.server.config.settings import ServerSettings, Settings
from inferencex.runtime.server.service import InferenceService, ServiceLimits
from tests.runtime.server.serving import LONG, serving

NO_KEYS = KeyStore()
PATIENCE = 30


class Socket:
    """One connection. `reading` can be cleared: then nothing more is taken from the server.

    closed: code and reason of the server's close, once it came
    """

    def __init__(self, app: FastAPI, headers: Mapping[str, str] | None = None) -> None:
        self._app = app
        self._headers = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        self._to_server: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._heard: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.reading = asyncio.Event()
        self.reading.set()
        self.accepted: dict[str, str] | None = None
        self.closed: tuple[int, str] | None = None

    async def __aenter__(self) -> Self:
        scope = {
            "type": "websocket",
            "path": "/v1/stream",
            "raw_path": b"/v1/stream",
            "query_string": b"",
            "root_path": "",
            "scheme": "ws",
            "subprotocols": [],
            "headers": [(b"host", b"server"), *self._headers],
            "extensions": {},
        }
        self._to_server.put_nowait({"type": "websocket.connect"})
        self._task = asyncio.create_task(self._app(scope, self._to_server.get, self._send))
        first = await asyncio.wait_for(self._heard.get(), PATIENCE)
        assert (first is None) == (self.accepted is None)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.reading.set()
        await self.leave()

    async def leave(self) -> None:
        """Go, and wait until the server has noticed."""
        self._to_server.put_nowait({"type": "websocket.disconnect", "code": 1005})
        await asyncio.wait_for(self._task, PATIENCE)

    def say(self, **message: Any) -> None:
        self.send(text=json.dumps(message))

    def send(self, **frame: Any) -> None:
        self._to_server.put_nowait({"type": "websocket.receive", **frame})

    async def hear(self) -> dict[str, Any]:
        message = await asyncio.wait_for(self._heard.get(), PATIENCE)
        assert message is not None, f"the socket was closed: {self.closed}"
        return message

    async def hear_close(self) -> tuple[int, str]:
        while await asyncio.wait_for(self._heard.get(), PATIENCE) is not None:
            pass
        assert self.closed is not None
        await asyncio.wait_for(self._task, PATIENCE)
        return self.closed

    async def hear_until(self, kind: str, message_id: str | None) -> list[dict[str, Any]]:
        """Return all messages up to one of this type about this id."""
        heard = [await self.hear()]
        while (heard[-1]["type"], heard[-1]["id"]) != (kind, message_id):
            heard.append(await self.hear())
        return heard

    async def error(self) -> dict[str, Any]:
        message = await self.hear()
        assert message["type"] == "error", message
        return {"id": message["id"], **message["error"]}

    async def _send(self, message: Any) -> None:
        await self.reading.wait()
        if message["type"] == "websocket.accept":
            self.accepted = {name.decode(): value.decode() for name, value in message.get("headers", [])}
            self._heard.put_nowait({})
        elif message["type"] == "websocket.send":
            self._heard.put_nowait(json.loads(message["text"]))
        else:
            self.closed = message["code"], message.get("reason") or ""
            self._heard.put_nowait(None)
            self._to_server.put_nowait({"type": "websocket.disconnect", "code": self.closed[0]})


class Scene:
    """The service, and sockets to it."""

    def __init__(self, service: InferenceService, app: FastAPI) -> None:
        self.service = service
        self.app = app

    def socket(self, **headers: str) -> Socket:
        return Socket(self.app, headers)


def converse(
    llm: LLM,
    scenario: Callable[[Scene], Awaitable[None]],
    keys: KeyStore = NO_KEYS,
    limits: ServiceLimits | None = None,
    **options: Any,
) -> None:
    """Run a scenario against a model that is served; in the end nothing may be left of its requests."""

    async def run() -> None:
        settings = Settings(server=ServerSettings(**options))
        async with serving(llm, limits) as service:
            await scenario(Scene(service, create_app(service, settings, keys, routers=[websocket.router()])))

    asyncio.run(asyncio.wait_for(run(), 60))


def prompt(text: str = "once upon", **fields: Any) -> dict[str, Any]:
    return {"type": "generate", "prompt": text, "temperature": 0, "max_tokens": 8, **fields}


def endless(**fields: Any) -> dict[str, Any]:
    return prompt(max_tokens=LONG, ignore_eos=True, **fields)


def joined(messages: list[dict[str, Any]], message_id: str, index: int = 0) -> str:
    """Return the text that the deltas of a generation spell."""
    return "".join(
        choice.get("text") or choice.get("delta", {}).get("content") or ""
        for message in messages
        if message["type"] == "delta" and message["id"] == message_id
        for choice in message["choices"]
        if choice["index"] == index
    )

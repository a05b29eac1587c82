"""One request on a connection of its own, in steps, so that a client can leave between any two of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from tests.soak.tally import ServerGone, WrongAnswer


@dataclass(frozen=True)
class Address:
    """Where the server listens, and with which key it is asked."""

    host: str
    port: int
    grpc_port: int
    key: str
    admin_key: str


class Exchange:
    """A connection that is closed at the end of the block, at once if the block is left by `leave`."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self.status = 0
        self._headers: dict[str, str] = {}

    async def __aenter__(self) -> Self:
        try:
            self._reader, self._writer = await asyncio.open_connection(self._address.host, self._address.port)
        except ConnectionRefusedError as error:
            raise ServerGone("the connection was refused", answered=False) from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.transport.abort()

    def send(self, path: str, body: bytes, *, key: str | None = None, method: str = "POST", part: float = 1.0) -> None:
        """Send a request, or only a part of its body."""
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: server\r\nConnection: close\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {key or self._address.key}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body[: int(len(body) * part)])

    def leave(self) -> None:
        """Close the connection without waiting for anything."""
        self._writer.close()

    async def begin(self) -> int:
        """Wait for the headers of the answer, and return the status."""
        try:
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise WrongAnswer(f"the connection was closed before an answer: {error!r}") from error
        first, *lines = head.strip().split("\r\n")
        self.status = int(first.split(" ")[1])
        self._headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return self.status

    async def json(self) -> Any:
        """Return the whole body."""
        return json.loads(b"".join([part async for part in self._body()]))

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the data of each event of a stream."""
        rest = b""
        async for part in self._body():
            *events, rest = (rest + part).split(b"\n\n")
            for event in events:
                yield event.removeprefix(b"data: ")
        if rest:
            raise WrongAnswer(f"the stream ended within an event: {rest[:100]!r}")

    async def _body(self) -> AsyncIterator[bytes]:
        if "content-length" in self._headers:
            yield await self._reader.readexactly(int(self._headers["content-length"]))
            return
        while True:
            size = int(await self._reader.readline(), 16)
            data = await self._reader.readexactly(size + 2)
            if size == 0:
                return
            yield data[:-2]


async def refusal(exchange: Exchange) -> dict[str, Any]:
    """Return the error of an answer that is one. Raises ServerGone for that of a server that shuts down."""
    content = await exchange.json()
    if set(content) != {"error"} or set(content["error"]) != {"message", "type", "param", "code"}:
        raise WrongAnswer(f"status {exchange.status} with {content}")
    error: dict[str, Any] = content["error"]
    if exchange.status == 503 and error["code"] == "shutting_down":
        raise ServerGone("the server shuts down", answered=True)
    return error

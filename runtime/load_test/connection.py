"""HTTP/1.1 for a load generator: connections that are used again, and bytes handed on in the callback they arrive in.

The bytes of an answer reach its reader without a task being woken for each, which is most of what reading a stream of
tokens costs; the parsing is llhttp's.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import httptools

from inferencex.formats.errors import OptionError


class Reader(Protocol):
    """Takes an answer apart while it arrives."""

    def begin(self, status: int) -> None:
        """Take the status, before anything of the body."""
        ...

    def body(self, data: bytes, now: float) -> None:
        """Take the next bytes of the body, and when they arrived (`time.perf_counter`)."""
        ...


class HttpFailure(Exception):
    """An answer that did not come; `kind` is "connect", "disconnect" or "protocol"."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _NothingReceived(HttpFailure):
    """The connection was closed before a byte of the answer: a server may do so to one that was idle."""


@dataclass(frozen=True)
class Origin:
    """Where the server is: `http://host:port/prefix`, whose prefix goes in front of every path."""

    host: str
    port: int
    prefix: str
    tls: bool

    @classmethod
    def parse(cls, url: str) -> Origin:
        """Read a URL, with or without `/v1` at its end; OptionError for what is none."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise OptionError(
                f"--url {url}: is no address ({error}); expected such as http://127.0.0.1:8000"
            ) from error
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or parts.username:
            raise OptionError(f"--url {url}: expected http:// or https://, a host and a port, without key or query")
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        tls = parts.scheme == "https"
        return cls(host, port or (443 if tls else 80), prefix, tls)

    @property
    def authority(self) -> str:
        """Host and port as the `Host` header has them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.prefix}"


class Connection(asyncio.Protocol):
    """One connection: an answer at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._reader: Reader | None = None
        self._done: asyncio.Future[None] | None = None
        self._now = 0.0
        self._received = False

    async def exchange(self, request: bytes, reader: Reader) -> None:
        """Send a request and wait until `reader` has the whole answer; HttpFailure when it does not come."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._reader = reader
        self._received = False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        finally:
            self._done = self._reader = None

    @property
    def reusable(self) -> bool:
        """Whether another request may be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        """Drop the connection at once, with what is still to come."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport (of asyncio.Protocol)."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Parse what arrived (of asyncio.Protocol)."""
        self._now = time.perf_counter()
        self._received = True
        if self._parser is None or self._done is None:  # bytes that nobody asked for
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(HttpFailure("protocol", f"the answer is not HTTP ({error})"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Fail the request under way (of asyncio.Protocol)."""
        kind = HttpFailure if self._received else _NothingReceived
        self._fail(kind("disconnect", f"the server closed the connection{f' ({error})' if error else ''}"))

    def on_headers_complete(self) -> None:
        """Pass the status on (of httptools)."""
        if self._reader is not None and self._parser is not None:
            self._reader.begin(self._parser.get_status_code())

    def on_body(self, data: bytes) -> None:
        """Pass bytes of the body on (of httptools)."""
        if self._reader is not None:
            self._reader.body(data, self._now)

    def on_message_complete(self) -> None:
        """End the exchange (of httptools)."""
        if self._parser is not None and not self._parser.should_keep_alive():
            self.close()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, failure: HttpFailure) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(failure)


class HttpClient:
    """Sends requests to one server, over as many connections as there are requests at a time."""

    def __init__(self, origin: Origin, api_key: str | None = None) -> None:
        self.origin = origin
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if origin.tls else None
        head = [f"Host: {origin.authority}", "Accept: */*", "User-Agent: inferencex-bench"]
        if api_key is not None:
            if not api_key.isascii() or not api_key.isprintable():
                raise OptionError("--api-key: has characters that no HTTP header can carry")
            head.append(f"Authorization: Bearer {api_key}")
        self._head = "\r\n".join(head)

    def encode(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return a request as it is sent."""
        lines = [f"{method} {self.origin.prefix}{path} HTTP/1.1", self._head]
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + body

    async def send(self, request: bytes, reader: Reader) -> None:
        """Send what `encode` returned, and wait for the whole answer.

        Raises HttpFailure. When it is cancelled, the connection is dropped, so that the server learns of it.
        """
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                try:
                    await self._exchange(connection, request, reader)
                except _NothingReceived:
                    break  # closed by the server just as it was used again: it never saw the request
                return
        try:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(Connection, self.origin.host, self.origin.port, ssl=self._tls)
        except OSError as error:
            raise HttpFailure("connect", f"{self.origin} cannot be reached ({error.strerror or error})") from error
        await self._exchange(connection, request, reader)

    async def _exchange(self, connection: Connection, request: bytes, reader: Reader) -> None:
        try:
            await connection.exchange(request, reader)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            self._idle.append(connection)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

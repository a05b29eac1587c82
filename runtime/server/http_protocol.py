"""HTTP/1.1 on a socket, with limits on what comes before a request is known: its headers, and their time."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from inferencex.runtime.server.errors import InvalidRequest, ServiceError, body
from inferencex.runtime.server.http_errors import SlowRequest

MAX_HEADER_BYTES = 64 << 10  # of request line and headers together
MAX_HEADERS = 256
HEADER_TIMEOUT = 30.0  # seconds


class HeadersTooLarge(ServiceError):
    """The request line and headers are longer than this server takes."""

    status = 431
    type = "invalid_request_error"
    default_code = "headers_too_large"


class OpenTransport:
    """A transport to which writing is no error once it is closed, as asyncio has it.

    uvloop raises instead, and between a client's leaving and our hearing of it there is time to write.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def write(self, data: bytes) -> None:
        """Write, unless there is nobody to read it."""
        if not self._transport.is_closing():
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        """Pass on everything else."""
        return getattr(self._transport, name)


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which otherwise takes headers without end and waits for them forever.

    What is no HTTP is answered in the shape of all other errors, and HTTP/1.0 without chunks, which it does not know.
    """

    header_timeout = HEADER_TIMEOUT
    _deadline: asyncio.TimerHandle | None = None
    _header_bytes = 0
    _refusal: ServiceError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(OpenTransport(transport))  # type: ignore[arg-type]
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._disarm()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Begin to count, and to wait for the end of the headers."""
        super().on_message_begin()
        self._header_bytes = 0
        self._arm()

    def on_url(self, url: bytes) -> None:
        """Take a part of the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self._count(len(name) + len(value))
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refuse(HeadersTooLarge(f"the request has more than {MAX_HEADERS} headers"))

    def on_headers_complete(self) -> None:
        """Hand the request to the application."""
        self._disarm()
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not None and self.cycle is not before and self.parser.get_http_version() == "1.0":
            _end_with_the_connection(self.cycle)

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be understood, and close the connection."""
        error = self._refusal or InvalidRequest("this is not a valid HTTP/1.1 request")
        content = json.dumps(body(error)).encode()
        phrase = HTTPStatus(error.status).phrase
        head = (
            f"HTTP/1.1 {error.status} {phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + content)
        self.transport.close()

    def _count(self, nbytes: int) -> None:
        self._header_bytes += nbytes
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(HeadersTooLarge(f"the request has more than {MAX_HEADER_BYTES} bytes of headers"))

    def _refuse(self, error: ServiceError) -> None:
        """Have the parser stop; what it raises is answered by `send_400_response`."""
        self._refusal = error
        raise error

    def _arm(self) -> None:
        self._disarm()
        self._deadline = asyncio.get_running_loop().call_later(self.header_timeout, self._expire)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        self._refusal = SlowRequest(f"the headers did not arrive within {self.header_timeout:g} s")
        self.send_400_response(str(self._refusal))


def _end_with_the_connection(cycle: RequestResponseCycle) -> None:
    """Have an answer without a length end where the connection does (RFC 9112, section 6.3)."""
    send, unknown_length = cycle.send, False

    async def sending(message: Message) -> None:
        nonlocal unknown_length
        if message["type"] == "http.response.start":
            unknown_length = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if unknown_length:
                cycle.chunked_encoding = False
        elif unknown_length:
            cycle.expected_content_length = len(message.get("body", b""))  # every piece is as long as it should be
        await send(message)  # type: ignore[arg-type]

    cycle.send = sending  # type: ignore[method-assign, assignment]


def protocol_class(header_timeout: float) -> type[Any]:
    """Return the protocol with another time for headers, in seconds."""
    return type("HttpProtocol", (LimitedHttpProtocol,), {"header_timeout": header_timeout})

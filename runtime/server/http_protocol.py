"""HTTP/1.1 on a socket, with limits on what comes before a request is known: its headers, and their time."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

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


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which otherwise takes headers without end and waits for them forever.

    What is no HTTP is answered in the shape of all other errors.
    """

    header_timeout = HEADER_TIMEOUT
    _deadline: asyncio.TimerHandle | None = None
    _header_bytes = 0
    _refusal: ServiceError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
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
        super().on_headers_complete()

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


def protocol_class(header_timeout: float) -> type[Any]:
    """Return the protocol with another time for headers, in seconds."""
    return type("HttpProtocol", (LimitedHttpProtocol,), {"header_timeout": header_timeout})

"""Bodies are taken whole, within a size and a time, before a route sees them; JSON is looked at first."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inferencex.runtime.server.errors import InvalidRequest, ServiceError, TooLarge
from inferencex.runtime.server.http_errors import SlowRequest, error_response
from inferencex.runtime.server.middleware.json_limits import check_json

_BODILESS = ("GET", "HEAD", "OPTIONS")
_LARGE = 1 << 18  # bytes, from which looking at a body would hold other requests up


class Bodies:
    """Limits bodies, with or without a length in front of them.

    max_bytes:  largest body
    max_depth:  deepest nesting of JSON
    timeout:    seconds for the whole body
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_depth: int, timeout: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_depth = max_depth
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope["method"] in _BODILESS:
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
            if body and len(body) < _LARGE:
                check_json(body, self._max_depth)
            elif body:
                await asyncio.to_thread(check_json, body, self._max_depth)
        except ServiceError as error:
            # What is left of the body is not read, so nothing more can be asked on this connection.
            await error_response(error, {"Connection": "close"})(scope, receive, send)
            return
        if body is None:  # the client left
            return
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the body; None when the client left before its end."""
        length = Headers(scope=scope).get("content-length")
        if length is not None:
            if not (length.isascii() and length.isdecimal()):
                raise InvalidRequest(f"the header Content-Length is {length[:40]!r}, expected a number of bytes")
            self._check_size(int(length[:20]))
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    size += len(part)
                    self._check_size(size)
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError as error:
            raise SlowRequest(f"the body did not arrive within {self._timeout:g} s; {size} bytes of it did") from error

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise TooLarge(f"the body is larger than the {self._max_bytes} bytes that this server takes")

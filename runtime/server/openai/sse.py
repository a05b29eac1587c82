"""Server-sent events: a response that is written as it is generated, and ended when nobody is there any more."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inferencex.runtime.server.errors import ServiceError, body
from inferencex.runtime.server.generation import Generation
from inferencex.runtime.server.openai.clients import watched

DONE = b"data: [DONE]\n\n"

compact = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
"""JSON without spaces, and ASCII only, for some clients take other line separators than JSON does."""

__all__ = ["DONE", "EventStream", "compact", "event", "quoted"]


def event(value: Mapping[str, Any]) -> bytes:
    """Return one event."""
    return f"data: {compact(value)}\n\n".encode("ascii")


def error_event(error: ServiceError) -> bytes:
    """Return how an error is told in a stream that has begun."""
    return event(body(error)) + DONE


class EventStream(Response):
    """Sends what an iterator yields, piece by piece, from generations that it closes at the end.

    The status is sent with the first piece: what fails before that is an ordinary error. Later errors are an event.
    When the client disconnects, the generations are closed at once.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        generations: Sequence[Generation],
        on_error: Callable[[ServiceError], bytes] = error_event,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._pieces = pieces
        self._generations = generations
        self._on_error = on_error

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        """Set the headers; there is no length to tell."""
        super().init_headers(headers)
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the response."""
        try:
            async with watched(receive, self._close):
                await self._write(send)
        finally:
            self._close()

    async def _write(self, send: Send) -> None:
        begun = False
        try:
            async for piece in self._pieces:
                if not begun:
                    begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except ServiceError as error:
            if not begun:
                raise
            await send({"type": "http.response.body", "body": self._on_error(error), "more_body": True})
        finally:
            await self._pieces.aclose()
        if begun:  # else it was closed before it said anything, and nobody is there
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _close(self) -> None:
        for generation in self._generations:
            generation.close()

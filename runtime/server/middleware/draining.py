"""A server that is about to stop keeps no connections."""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Draining:
    """Has connections closed after their answer while the server drains, so that clients go elsewhere."""

    def __init__(self, app: ASGIApp, is_draining: Callable[[], bool]) -> None:
        self._app = app
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start" and self._is_draining():
                MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        await self._app(scope, receive, send_last)

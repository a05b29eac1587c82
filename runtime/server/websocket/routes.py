"""The route `/v1/stream`."""

from __future__ import annotations

from fastapi import APIRouter, WebSocket

from inferencex.runtime.server.config.settings import Settings
from inferencex.runtime.server.websocket.closing import CloseCode
from inferencex.runtime.server.websocket.origin import is_allowed
from inferencex.runtime.server.websocket.session import Session, SessionLimits


def router() -> APIRouter:
    """Return the route of the WebSocket."""
    routes = APIRouter()

    @routes.websocket("/v1/stream")
    async def stream(socket: WebSocket) -> None:
        settings: Settings = socket.app.state.settings
        options = settings.server
        headers = socket.headers
        if not is_allowed(headers.get("origin"), headers.get("host"), options.cors_origins):
            await socket.close(CloseCode.POLICY)  # before it is accepted: the handshake is answered with 403
            return
        await socket.accept()
        limits = SessionLimits(options.max_body_bytes, options.max_json_depth)
        await Session(socket, socket.app.state.service, socket.app.state.keys, limits).run()

    return routes

"""The WebSocket `/v1/stream`: several generations side by side on one connection."""

from inferencex.runtime.server.websocket.routes import router

__all__ = ["router"]

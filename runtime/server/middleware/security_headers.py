"""Headers that keep browsers from doing what nobody asked for."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_ALWAYS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
)
# The pages that describe the API come with scripts of their own from elsewhere; nothing else may be loaded there.
_DOCS_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src 'self' data: https://fastapi.tiangolo.com; "
    "script-src 'unsafe-inline' https://cdn.jsdelivr.net; style-src 'unsafe-inline' https://cdn.jsdelivr.net; "
    "base-uri 'none'; frame-ancestors 'none'"
)
_DOCS = ("/docs", "/redoc")


class SecurityHeaders:
    """Adds the headers to every answer; what a route set itself is left alone.

    cross_origin: whether pages of other origins may use the API, so that its answers are not kept from them
    """

    def __init__(self, app: ASGIApp, cross_origin: bool = False) -> None:
        self._app = app
        self._headers = {**_ALWAYS}
        if cross_origin:
            del self._headers["Cross-Origin-Resource-Policy"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    headers.setdefault(name, value)
                if headers.get("content-type", "").startswith("text/html"):
                    policy = _DOCS_POLICY if scope["path"].startswith(_DOCS) else _POLICY
                    headers.setdefault("Content-Security-Policy", policy)
            await send(message)

        await self._app(scope, receive, send_with_headers)

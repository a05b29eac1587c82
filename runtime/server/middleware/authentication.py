"""Keys: who asks is known before anything else is done for a request."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from inferencex.runtime.server.access.keys import KeyStore
from inferencex.runtime.server.calls import ANONYMOUS
from inferencex.runtime.server.errors import NotAuthenticated
from inferencex.runtime.server.http_errors import error_response

API = ("/v1", "/tokenize", "/detokenize")
GROUPS = {
    "docs": ("/docs", "/openapi.json"),
    "health": ("/health", "/ready"),
    "metrics": ("/metrics",),
    "page": ("/", "/assets"),
}
"""Paths beside the API that can be made to need a key, as `server.protect` names them."""


class Authentication:
    """Sets `request.state.caller`. What needs a key and comes without is answered with 401, before its body is read.

    A WebSocket is let through: browsers cannot send a key with its handshake, so its session asks for one.

    protect: the groups of paths that need a key beside the API
    """

    def __init__(self, app: ASGIApp, keys: KeyStore, protect: Collection[str] = ()) -> None:
        self._app = app
        self._keys = keys
        self._protected = API + tuple(path for group in protect for path in GROUPS[group])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            caller = self._keys.authenticate(Headers(scope=scope).get("authorization"))
        except NotAuthenticated as error:
            if self.needs_key(scope["path"]):
                # The body is not read, so nothing more can be asked on this connection.
                await error_response(error, {"Connection": "close"})(scope, receive, send)
                return
            caller = ANONYMOUS
        scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)

    def needs_key(self, path: str) -> bool:
        """Return whether a path is one of those that are protected, or below one."""
        return any(path == place or (place != "/" and path.startswith(f"{place}/")) for place in self._protected)

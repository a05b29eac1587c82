"""What became of each HTTP request: a line in the log, and a measurement."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LOG = logging.getLogger("inferencex.http")

_QUIET = ("/health", "/ready", "/metrics")
_CLIENT_LEFT = 499  # nginx's number for a client that left before there was an answer


class HttpMetrics(Protocol):
    """Counts requests."""

    def http_request(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count one; `path` is a route's pattern, so that there are not ever more of them."""
        ...


class AccessLog:
    """Tells log and metrics of requests when they are over.

    log:   whether lines are wanted
    quiet: paths that machines ask for every few seconds, which are logged at level debug
    """

    def __init__(
        self, app: ASGIApp, metrics: HttpMetrics | None = None, log: bool = True, quiet: Collection[str] = _QUIET
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._wants_log = log
        self._quiet = frozenset(quiet)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status, nbytes = _CLIENT_LEFT, 0

        async def counting(message: Message) -> None:
            nonlocal status, nbytes
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                nbytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, counting)
        finally:
            seconds = time.monotonic() - began
            if self._metrics is not None:
                route = getattr(scope.get("route"), "path", "unknown")
                self._metrics.http_request(scope["method"], route, status, seconds)
            if self._wants_log:
                self._log(scope, status, nbytes, seconds)

    def _log(self, scope: Scope, status: int, nbytes: int, seconds: float) -> None:
        level = logging.DEBUG if scope["path"] in self._quiet else logging.INFO
        if not _LOG.isEnabledFor(level):
            return
        state, client = scope.get("state", {}), scope.get("client")
        caller = state.get("caller")
        fields = {
            "request_id": state.get("request_id", ""),
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "bytes": nbytes,
            "duration": round(seconds, 6),
            "caller": None if caller is None else caller.name,
            "client": client[0] if client else None,
        }
        _LOG.log(level, "", extra={"event": "http", "fields": fields})

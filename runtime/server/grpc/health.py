"""The standard health service: whether the server, and `InferenceService` in it, can serve now."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inferencex.runtime.server.grpc.status import Context

_LOOK_EVERY = 1.0  # seconds between looks at the service, for those who watch

_Response = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Answers from what `is_ready` says at the moment; anyone may ask, without a key.

    names: what may be asked about; "" is the server as a whole
    """

    def __init__(self, is_ready: Callable[[], bool], names: tuple[str, ...]) -> None:
        self._is_ready = is_ready
        self._names = ("", *names)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Say NOT_SERVING from now on, and let those who watch know at once."""
        self._stopping.set()

    async def Check(self, request: Any, context: Context) -> Any:
        """Return the status; NOT_FOUND for a service that is not there."""
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service!r}")
        return _Response(status=self._status(request.service))

    async def Watch(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """Send the status, and again whenever it changes; it ends when the server stops."""
        last = None
        while True:
            status = self._status(request.service)
            if status != last:
                yield _Response(status=status)
                last = status
            if self._stopping.is_set():
                return
            try:
                await asyncio.wait_for(self._stopping.wait(), _LOOK_EVERY)
            except TimeoutError:
                continue

    def _status(self, name: str) -> Any:
        if name not in self._names:
            return _Response.SERVICE_UNKNOWN
        serving = self._is_ready() and not self._stopping.is_set()
        return _Response.SERVING if serving else _Response.NOT_SERVING

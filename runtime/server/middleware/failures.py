"""The last resort of a request: an error that nobody foresaw is logged, and answered in OpenAI's shape."""

from __future__ import annotations

import asyncio
import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inferencex.runtime.server.errors import Failed
from inferencex.runtime.server.http_errors import error_response

_LOG = logging.getLogger(__name__)


class SlowReader(TimeoutError):
    """A client does not take what is sent to it."""


class Failures:
    """Catches what the routes did not, and gives up on clients that do not read their answer.

    send_timeout: seconds that a client may take to make room for a piece of its answer
    """

    def __init__(self, app: ASGIApp, send_timeout: float) -> None:
        self._app = app
        self._send_timeout = send_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            try:
                async with asyncio.timeout(self._send_timeout):
                    await send(message)
            except TimeoutError as error:
                raise SlowReader(f"nothing was read for {self._send_timeout:g} s") from error

        request_id = scope.get("state", {}).get("request_id", "")
        try:
            await self._app(scope, receive, sending)
        except SlowReader as error:  # returning closes the connection
            _LOG.info("%s", error, extra={"event": "slow_client", "fields": {"request_id": request_id}})
        except Exception as error:  # of any kind: one request's failure is not the server's
            fields = {"request_id": request_id}
            _LOG.exception("unexpected %s", type(error).__name__, extra={"event": "failed", "fields": fields})
            if started:  # the client sees that the connection breaks off
                return
            told = Failed(f"the server failed at this request; its log says why, under the id {request_id}")
            await error_response(told)(scope, receive, send)

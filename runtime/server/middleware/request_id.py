"""Every request has an id: the client's, or one of ours. It is in the answer, the logs and the traces."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"
_VALID = re.compile(r"[\w.:+/=@-]{1,128}", re.ASCII)


def request_id_for(given: str | None) -> str:
    """Return the id of a request: the one its client gave, if it is acceptable, or a new one."""
    return given if given is not None and _VALID.fullmatch(given) else f"req-{uuid.uuid4().hex}"


class RequestIds:
    """Sets `request.state.request_id`, and the header of the answer.

    A client's id is taken if it is at most 128 characters of letters, digits and `._:+/=@-`; anything else could be
    made to look like something else in a log, and is replaced.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        request_id = request_id_for(Headers(scope=scope).get(HEADER))
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.accept", "websocket.http.response.start"):
                message.setdefault("headers", [])
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)

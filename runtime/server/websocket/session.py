"""One socket from its acceptance to its end: messages in, generations side by side, messages out."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import WebSocket, WebSocketDisconnect

from inferencex.runtime.server.access.keys import KeyStore
from inferencex.runtime.server.calls import Caller
from inferencex.runtime.server.errors import (
    Failed,
    InvalidRequest,
    NotAuthenticated,
    ServiceError,
    TooManyRequests,
    body,
)
from inferencex.runtime.server.openai.context import TRACE_HEADERS, Context
from inferencex.runtime.server.service import InferenceService
from inferencex.runtime.server.websocket.answers import answers
from inferencex.runtime.server.websocket.closing import CloseCode, Closing
from inferencex.runtime.server.websocket.frames import Message, decode, read_id, read_message
from inferencex.runtime.server.websocket.outbox import Outbox

_LOG = logging.getLogger(__name__)

_MAX_REASON_BYTES = 123  # of a close frame


@dataclass(frozen=True)
class SessionLimits:
    """What one socket may do.

    max_frame_bytes: of one message of the client
    max_depth:       deepest nesting of its JSON
    max_generations: at the same time
    max_unread:      characters of messages that wait for the client to read
    auth_seconds:    until a client without an `Authorization` header has to have sent its key
    close_seconds:   to deliver what is queued, and the close frame
    """

    max_frame_bytes: int
    max_depth: int
    max_generations: int = 64
    max_unread: int = 4 << 20
    auth_seconds: float = 10.0
    close_seconds: float = 2.0


class Session:
    """Serves one accepted socket; whatever ends it, all its generations are closed at once."""

    def __init__(
        self,
        socket: WebSocket,
        service: InferenceService,
        keys: KeyStore,
        limits: SessionLimits,
    ) -> None:
        self._socket = socket
        self._service = service
        self._keys = keys
        self._limits = limits
        self._caller: Caller | None = None
        self._request_id: str = socket.scope.get("state", {}).get("request_id") or secrets.token_hex(16)
        self._trace_headers = {name: socket.headers[name] for name in TRACE_HEADERS if name in socket.headers}
        self._num_begun = 0
        self._outbox = Outbox(limits.max_unread)
        self._generations: dict[str, asyncio.Task[None]] = {}  # by id, for as long as the client may speak of them
        self._tasks: set[asyncio.Task[None]] = set()  # all that have not ended
        self._closing: asyncio.Future[Closing] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Serve until the client leaves, or a Closing says that it has to."""
        reader = asyncio.create_task(self._read())
        writer = asyncio.create_task(self._write())
        try:
            ends: set[asyncio.Future[Any]] = {reader, writer, self._closing}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            await _stop(reader, *self._tasks)
            if self._closing.done():
                await self._close(self._closing.result(), writer)
        finally:
            await _stop(reader, writer, *self._tasks)

    async def _read(self) -> None:
        patience = asyncio.get_running_loop().call_later(self._limits.auth_seconds, self._end_without_key)
        try:
            self._identify()
            while (event := await self._socket.receive())["type"] != "websocket.disconnect":
                await self._take(event)
        except Closing as closing:
            self._end(closing)
        except Exception:  # a defect; the socket is closed, and others are not concerned
            _LOG.exception("a WebSocket session failed")
            self._end(Closing(CloseCode.INTERNAL, "the server failed to serve the socket"))
        finally:
            patience.cancel()

    async def _write(self) -> None:
        try:
            await self._outbox.deliver(self._socket.send_text)
        except WebSocketDisconnect:
            return

    def _end_without_key(self) -> None:
        if self._caller is None:
            error = NotAuthenticated(f"no API key was given within {self._limits.auth_seconds:g} s")
            self._put_error(error, None)
            self._end(Closing(CloseCode.POLICY, str(error)))

    def _identify(self) -> None:
        """Take the key of the handshake; without one, a key is waited for if the server wants one."""
        header = self._socket.headers.get("authorization")
        if header is not None or not self._keys.required:
            self._authenticate(header)

    def _authenticate(self, authorization: str | None) -> None:
        try:
            self._caller = self._keys.authenticate(authorization)
        except NotAuthenticated as error:
            self._put_error(error, None)
            raise Closing(CloseCode.POLICY, str(error)) from error

    async def _take(self, event: Mapping[str, Any]) -> None:
        """Act on a frame; what is wrong with its message is told to the client."""
        value = None
        try:
            value = await decode(event, self._limits.max_frame_bytes, self._limits.max_depth)
            self._handle(read_message(value))
        except ServiceError as error:
            self._put_error(error, read_id(value))

    def _handle(self, message: Message) -> None:
        if message.type == "ping":
            self._put({"type": "pong", "id": message.id})
        elif message.type == "auth":
            key = message.fields.get("key")
            if not isinstance(key, str):
                raise InvalidRequest("auth needs a key: a string", param="key")
            self._authenticate(f"Bearer {key}")
            self._put({"type": "authenticated", "id": message.id})
        elif message.type == "cancel":
            self._cancel(message.generation_id)
        else:
            self._begin(message)

    def _begin(self, message: Message) -> None:
        name = message.generation_id
        if self._caller is None:
            raise NotAuthenticated('no API key was given; send {"type": "auth", "key": ...} first')
        if name in self._generations:
            raise InvalidRequest(
                f"a generation with the id {name!r} is under way, and goes on; choose another id",
                code="duplicate_id",
                param="id",
            )
        if len(self._generations) >= self._limits.max_generations:
            raise TooManyRequests(
                f"{len(self._generations)} generations are under way on this socket, which is as many as it may have",
                code="too_many_generations",
            )
        self._num_begun += 1
        context = Context(self._service, self._caller, f"{self._request_id}-{self._num_begun}", self._trace_headers)
        task = asyncio.create_task(self._generate(name, message, context))
        self._generations[name] = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _cancel(self, message_id: str) -> None:
        task = self._generations.pop(message_id, None)
        if task is None:
            raise InvalidRequest(
                f"no generation with the id {message_id!r} is under way", code="unknown_id", param="id"
            )
        task.cancel()  # it says nothing any more
        self._put({"type": "cancelled", "id": message_id})

    async def _generate(self, name: str, message: Message, context: Context) -> None:
        try:
            async with aclosing(answers(context, message)) as found:
                async for answer in found:
                    self._put({**answer, "id": name})
        except ServiceError as error:
            self._put_error(error, name)
        except Exception:  # a defect; the client is told no more than that, and the log everything
            _LOG.exception("a generation of a WebSocket failed")
            self._put_error(Failed("the server failed to serve the request"), name)
        if self._generations.get(name) is asyncio.current_task():  # cancelled, the id may be another generation's
            del self._generations[name]

    def _put(self, message: Mapping[str, Any]) -> None:
        try:
            self._outbox.put(message)
        except Closing as closing:
            self._end(closing)

    def _put_error(self, error: ServiceError, message_id: str | None) -> None:
        self._put({"type": "error", "id": message_id, **body(error), "retry_after": error.retry_after})

    def _end(self, closing: Closing) -> None:
        if not self._closing.done():
            self._closing.set_result(closing)

    async def _close(self, closing: Closing, writer: asyncio.Task[None]) -> None:
        """Deliver what is queued and close the socket, for as long as a client may take for that."""
        try:
            async with asyncio.timeout(self._limits.close_seconds):
                if closing.flush:
                    self._outbox.finish()
                    await writer
                await _stop(writer)
                reason = closing.reason.encode()[:_MAX_REASON_BYTES].decode(errors="ignore")
                await self._socket.close(closing.code, reason)
        except (TimeoutError, WebSocketDisconnect, RuntimeError):  # it is gone, or will be without a farewell
            _LOG.debug("a WebSocket was not closed cleanly: %s", closing.reason)


async def _stop(*tasks: asyncio.Task[None]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

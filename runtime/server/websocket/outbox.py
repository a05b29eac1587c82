"""Messages on their way to one client: queued without waiting, so that no generation waits for a slow reader."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from inferencex.runtime.server.websocket.closing import CloseCode, Closing


class Outbox:
    """A queue of at most `max_chars` characters of JSON, emptied by `deliver`."""

    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars
        self._num_chars = 0
        self._queue: deque[str] = deque()
        self._changed = asyncio.Event()
        self._finished = False

    def put(self, message: Mapping[str, Any]) -> None:
        """Queue a message. Raises Closing when the client has left too much unread."""
        text = json.dumps(message, ensure_ascii=False, separators=(",", ":"))
        if self._queue and self._num_chars + len(text) > self._max_chars:
            raise Closing(CloseCode.POLICY, "the client does not read what it asked for", flush=False)
        self._queue.append(text)
        self._num_chars += len(text)
        self._changed.set()

    def finish(self) -> None:
        """Let `deliver` end once everything is sent."""
        self._finished = True
        self._changed.set()

    async def deliver(self, send: Callable[[str], Awaitable[None]]) -> None:
        """Send messages in order, until `finish`."""
        while True:
            while self._queue:
                text = self._queue[0]
                await send(text)
                self._queue.popleft()
                self._num_chars -= len(text)
            if self._finished:
                return
            self._changed.clear()
            await self._changed.wait()

"""One engine for several threads: they take turns step by step, and each gets what is its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from inferencex.runtime.engine.engine import Engine
from inferencex.runtime.outputs import CompletionDelta, RequestOutput


class Inbox(Protocol):
    """Where a request's deltas go. `append` is called with the engine's lock held, from any thread, and is quick."""

    def append(self, delta: Any, /) -> None:
        """Take a delta."""


class SharedEngine:
    """An engine and its lock. Whoever waits for a result runs steps, and hands out what they bring to all.

    after_step: called after every step, without the lock, by the thread that ran it
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.after_step: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._inboxes: dict[str, Inbox] = {}

    def submit(self, requests: Iterable[Any], inbox: Inbox) -> None:
        """Queue prepared requests, whose deltas go to `inbox` from now on. Waits for the step that is running."""
        with self._lock:
            for request in requests:
                self.engine.submit(request)
                self._inboxes[request.id] = inbox

    def forget(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """Abort what has not finished, deliver nothing more of these requests, and return what they had so far."""
        with self._lock:
            outputs = [self.engine.abort(request_id) for request_id in request_ids if self._drop(request_id)]
        return [output for output in outputs if output is not None]

    def step_unless(self, ready: Sequence[Any] = ()) -> bool:
        """Run one step, unless `ready` has something by the time it is our turn; False when there is nothing to do.

        Raises what the backend raises; the requests of that step are over then, and the next step reports them.
        """
        with self._lock:
            if ready:
                return True
            if not self.engine.has_unfinished:
                return False
            self._hand_out(self.engine.step())
        for notify in self.after_step:
            notify()
        return True

    def drop_all(self) -> list[Inbox]:
        """Abort everything, and return each request's inbox: for a failure that no request is to blame for."""
        with self._lock:
            inboxes, self._inboxes = self._inboxes, {}
            for request_id in inboxes:
                self.engine.abort(request_id)
        return list(inboxes.values())

    def close(self) -> None:
        """Abort everything, and have the engine give back its model; it serves nothing any more."""
        with self._lock:
            for request_id in list(self._inboxes):
                self.engine.abort(request_id)
            self._inboxes.clear()
            self.engine.close()

    def _hand_out(self, deltas: Iterable[CompletionDelta]) -> None:
        for delta in deltas:
            inbox = self._inboxes.get(delta.request_id)
            if inbox is None:
                continue
            inbox.append(delta)
            if delta.output is not None:
                del self._inboxes[delta.request_id]

    def _drop(self, request_id: str) -> bool:
        return self._inboxes.pop(request_id, None) is not None

"""An engine on a thread of its own, for callers on an asyncio event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from inferencex.formats.errors import BackendError, InferenceXError
from inferencex.runtime.engine.sequence import Request
from inferencex.runtime.engine.shared import SharedEngine
from inferencex.runtime.engine.stats import EngineStats
from inferencex.runtime.outputs import CompletionDelta, RequestOutput

_LOG = logging.getLogger(__name__)


Arrival: TypeAlias = CompletionDelta | InferenceXError

_FAILURES_IN_A_ROW = 3  # of steps, after which nobody is kept waiting for the next one


class Listener:
    """One request's way back to its event loop.

    every_step: deliver deltas as they come; otherwise only the one that ends the request
    interval:   tokens that a delivered delta has at least, but for the first and the last of a continuation
    """

    __slots__ = ("_begun", "_deliver", "_every_step", "_held", "_interval", "_loop")

    def __init__(
        self, loop: EngineLoop, deliver: Callable[[Arrival], None], every_step: bool, interval: int = 1
    ) -> None:
        self._loop = loop
        self._deliver = deliver
        self._every_step = every_step
        self._interval = interval
        self._begun: set[int] = set()
        self._held: dict[int, CompletionDelta] = {}

    def append(self, delta: CompletionDelta) -> None:
        """Take a delta, on whatever thread ran the step."""
        if not self._every_step:
            if delta.output is not None:
                self._loop.post(self._deliver, delta)
            return
        if self._interval > 1:
            held = self._held.pop(delta.index, None)
            delta = delta if held is None else _joined(held, delta)
            ends = delta.finish_reason is not None or delta.output is not None
            if delta.index in self._begun and len(delta.token_ids) < self._interval and not ends:
                self._held[delta.index] = delta
                return
            self._begun.add(delta.index)
            if delta.output is not None:
                for other in self._held.values():
                    self._loop.post(self._deliver, other)
        self._loop.post(self._deliver, delta)

    def fail(self, error: InferenceXError) -> None:
        """Report that nothing more will come."""
        self._loop.post(self._deliver, error)


def _joined(first: CompletionDelta, second: CompletionDelta) -> CompletionDelta:
    """Return what two deltas of one continuation, one after the other, add to it together."""
    logprobs = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = (*(first.logprobs or ()), *(second.logprobs or ()))
    return replace(
        second, text=first.text + second.text, token_ids=first.token_ids + second.token_ids, logprobs=logprobs
    )


class EngineLoop:
    """Runs the steps of one engine for as long as it has work, and sleeps otherwise.

    `submit` and `abort` are called on the event loop that `start` was called on, and never wait for a step.
    """

    def __init__(self, shared: SharedEngine, name: str = "engine") -> None:
        self.shared = shared
        self.name = name
        self._unfinished: set[str] = set()
        self._commands: deque[Callable[[], None]] = deque()
        self._posted: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._stopped_by: InferenceXError = BackendError(f"{name} was stopped")
        self._thread: threading.Thread | None = None
        self._asyncio: asyncio.AbstractEventLoop | None = None

    @property
    def num_unfinished(self) -> int:
        """Requests that were submitted and whose end has not been delivered."""
        return len(self._unfinished)

    @property
    def stats(self) -> EngineStats:
        """Totals of the engine."""
        return self.shared.engine.stats

    @property
    def is_running(self) -> bool:
        """Whether the thread is there to serve."""
        return self._thread is not None and self._thread.is_alive() and not self._stopping

    def start(self) -> None:
        """Start the thread; results go to the running event loop."""
        self._asyncio = asyncio.get_running_loop()
        self.shared.after_step.append(self._flush)
        self._thread = threading.Thread(target=self._run, name=f"inferencex-{self.name}", daemon=True)
        self._thread.start()

    def submit(
        self, request: Request, deliver: Callable[[Arrival], None], *, every_step: bool, interval: int = 1
    ) -> None:
        """Queue a prepared request. `deliver` gets deltas, see `Listener`, or an error after which nothing comes."""
        self._unfinished.add(request.id)

        def arrive(arrival: Arrival) -> None:
            if isinstance(arrival, InferenceXError) or arrival.output is not None:
                self._unfinished.discard(request.id)
            deliver(arrival)

        listener = Listener(self, arrive, every_step, interval)

        def begin() -> None:
            try:
                self.shared.submit([request], listener)
            except Exception as error:  # of any kind: this request is over, and the thread goes on
                listener.fail(_told(error))

        if not self._command(begin):
            arrive(self._stopped_by)

    def abort(self, request_id: str, deliver: Callable[[RequestOutput | None], None]) -> None:
        """End a request before the next step: its blocks are free then.

        `deliver` gets what it had so far, after which nothing comes; None when its end was delivered already.
        """

        def aborted(output: RequestOutput | None) -> None:
            self._unfinished.discard(request_id)  # also without output: a step that failed may have ended it before
            deliver(output)

        def end() -> None:
            outputs: list[RequestOutput] = []
            try:
                outputs = self.shared.forget([request_id])
            except Exception:  # of any kind: what the request holds is given back all the same
                _LOG.exception("%s: a request could not be aborted", self.name)
            self.post(aborted, outputs[0] if outputs else None)

        if not (self.is_running and self._command(end)):
            deliver(None)

    def stop(self, timeout: float | None = None, error: InferenceXError | None = None) -> bool:
        """Abort what runs, whose callers are told `error`, and end the thread; tell whether it has ended by then.

        May be called from any thread but its own, and again to go on waiting.
        """
        with self._wake:
            if error is not None:
                self._stopped_by = error
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout)
        if self._flush in self.shared.after_step:
            self.shared.after_step.remove(self._flush)
        return self._thread is None or not self._thread.is_alive()

    def post(self, deliver: Callable[[Any], None], value: Any) -> None:
        """Have `deliver(value)` called on the event loop, at the latest after this step."""
        self._posted.append((deliver, value))

    def _command(self, command: Callable[[], None]) -> bool:
        """Have the thread do something; False when there will be no thread to do it."""
        with self._wake:
            if self._stopping:
                return False
            self._commands.append(command)
            self._wake.notify()
            return True

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # of any kind, outside of a step: nobody may wait for a thread that is not there
            _LOG.exception("%s: the engine's thread ended", self.name)
            with self._wake:
                self._stopped_by = BackendError(f"{self.name} has failed: {type(error).__name__}: {error}")
                self._stopping = True
            self._obey()
            self._end_all(self._stopped_by)
            self._flush()

    def _serve(self) -> None:
        failures = 0
        while True:
            with self._wake:
                while not (self._commands or self.shared.engine.has_unfinished or self._stopping):
                    self._wake.wait()
            stopping = self._stopping  # read first: no command comes after it is set
            self._obey()
            if stopping:
                self._end_all(self._stopped_by)
                self._flush()
                return
            try:
                self.shared.step_unless()
                failures = 0
            except Exception as error:  # of any kind: the requests of that step are over, and the next one is served
                failures += 1
                _LOG.error("%s: a step failed: %s", self.name, error, exc_info=not isinstance(error, InferenceXError))
                if failures >= _FAILURES_IN_A_ROW:
                    self._end_all(BackendError(f"{failures} steps in a row failed: {type(error).__name__}: {error}"))
            self._flush()

    def _obey(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _end_all(self, error: InferenceXError) -> None:
        for inbox in self.shared.drop_all():
            if isinstance(inbox, Listener):
                inbox.fail(error)

    def _flush(self) -> None:
        """Have everything posted delivered, in one go."""
        if not self._posted or self._asyncio is None:
            return
        try:
            self._asyncio.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the event loop is closed: nobody listens any more
            _LOG.debug("%s: %d results have nobody to go to", self.name, len(self._posted))
            self._posted.clear()

    def _deliver(self) -> None:
        while self._posted:
            deliver, value = self._posted.popleft()
            try:
                deliver(value)
            except Exception:  # of any kind: what others are waiting for is behind it
                _LOG.exception("%s: a result could not be delivered", self.name)


def _told(error: Exception) -> InferenceXError:
    return error if isinstance(error, InferenceXError) else BackendError(f"{type(error).__name__}: {error}")

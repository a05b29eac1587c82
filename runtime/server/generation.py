"""A request that was admitted: its deltas as they come, and everything given back when it is over."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from inferencex.formats.errors import InferenceXError
from inferencex.runtime.engine.sequence import Request
from inferencex.runtime.outputs import CompletionDelta, RequestOutput
from inferencex.runtime.server.calls import RequestRecord, Status
from inferencex.runtime.server.engine_loop import Arrival, EngineLoop
from inferencex.runtime.server.errors import Failed, ServiceError, TimedOut, Unavailable, told
from inferencex.runtime.server.models.served import ServedModel


class Held(Protocol):
    """Something a request holds while it runs, such as a model or a seat."""

    def release(self) -> None:
        """Give it back. Called once."""


class OutputCheck(Protocol):
    """Looks at what a continuation says so far."""

    async def __call__(self, text: str, finished: bool) -> None:
        """Raise ServiceError to end the request."""


@dataclass(frozen=True)
class Deadline:
    """When a request has to be over: `seconds` after it came, which is `at` on the event loop's clock."""

    seconds: float
    at: float

    def passed(self) -> TimedOut:
        """Return what the client is told then."""
        return TimedOut(f"the request took longer than the {self.seconds:g} s it was given; it was ended")


class Generation:
    """One request under way. Iterate over its deltas, or await `result`; close it in any case.

    Closing aborts what is still running, so that its blocks are free before the next step; it is done by
    `async with`, at the end of the iteration, and when an error is raised.
    """

    def __init__(
        self,
        model: ServedModel,
        loop: EngineLoop,
        request: Request,
        record: RequestRecord,
        held: list[Held],
        on_end: Callable[[RequestRecord], None],
        *,
        check: OutputCheck | None = None,
    ) -> None:
        self.model = model
        self.request_id = record.request_id
        self.prompt = request.prompt
        self.prompt_token_ids = request.prompt_token_ids
        self.params = request.params
        self.created = int(time.time())
        self._loop = loop
        self._request = request
        self._record = record
        self._held = held
        self._on_end = on_end
        self._check = check
        self._texts: dict[int, str] = {}
        self._began = time.monotonic()
        self._arrivals: deque[Arrival] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._over = False  # the engine will deliver nothing more
        self._closed = False
        self._delivered: RequestOutput | None = None  # by the engine, whether or not anybody has read it
        self.output: RequestOutput | None = None

    def begin(self, *, every_step: bool, deadline: Deadline | None, interval: int = 1) -> None:
        """Hand the request to the engine; it ends with `TimedOut` when the deadline has passed."""
        self._loop.submit(self._request, self._arrive, every_step=every_step, interval=interval)
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline.at, lambda: self.fail(deadline.passed()))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> CompletionDelta:
        while not self._arrivals:
            if self._closed or self._over:
                self.close()
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        arrival = self._arrivals.popleft()
        if isinstance(arrival, InferenceXError):
            raise self._failed(arrival)
        if arrival.output is not None:
            self.output = arrival.output
            if arrival.output.error is not None:
                raise self._failed(arrival.output.error)
        if self._check is not None:
            await self._checked(arrival)
        if arrival.output is not None:
            self._end("ok")
        return arrival

    async def result(self) -> RequestOutput:
        """Wait for the end and return it whole."""
        async for _ in self:
            pass
        if self.output is None:
            raise self._failed(Failed("the request was ended before it was done"))
        return self.output

    def close(self) -> None:
        """Give everything back, now. What still runs is aborted; closing twice does nothing."""
        self._end("aborted")

    async def aclose(self) -> None:
        """Close, for code that closes asynchronous iterators."""
        self.close()

    def fail(self, error: ServiceError) -> None:
        """End the request from outside, now, and give everything back; whoever iterates gets this error.

        That may be much later, for a client may be slow to take what came before.
        """
        if not self._closed:
            self._arrivals.clear()
            self._arrivals.append(error)
            self._end(_status(error), error)

    async def _checked(self, delta: CompletionDelta) -> None:
        if self._check is None:
            return
        texts = {delta.index: self._texts.get(delta.index, "") + delta.text}
        if delta.output is not None:
            texts = {output.index: output.text for output in delta.output.outputs}
        self._texts.update(texts)
        try:
            for text in texts.values():
                await self._check(text, delta.output is not None)
        except ServiceError as error:
            self._end("filtered", error)
            raise

    def _arrive(self, arrival: Arrival) -> None:
        if self._closed:
            return
        self._arrivals.append(arrival)
        if isinstance(arrival, InferenceXError):
            self._over = True
        elif arrival.output is not None:
            self._over, self._delivered = True, arrival.output
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _failed(self, error: InferenceXError) -> ServiceError:
        """End the request, and return what the client is told."""
        answer = told(error)
        self._end(_status(answer), answer)
        return answer

    def _end(self, status: Status, error: ServiceError | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        record = self._record
        record.status, record.error, record.output = status, error, self.output or self._delivered
        record.seconds = time.monotonic() - self._began
        if self._over:
            self._finish()
        else:  # what it holds is given back once the engine has let go of its blocks
            self._loop.abort(self._request.id, self._aborted)

    def _aborted(self, output: RequestOutput | None) -> None:
        if output is not None:
            self._record.output = output
        self._finish()

    def _finish(self) -> None:
        for held in self._held:
            held.release()
        self._held = []
        self._on_end(self._record)


def _status(error: ServiceError) -> Status:
    """Return what became of a request that ended with an error; a shutdown is nobody's failure."""
    if isinstance(error, TimedOut):
        return "timeout"
    return "aborted" if isinstance(error, Unavailable) else "failed"

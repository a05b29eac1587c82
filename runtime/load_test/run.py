"""One measurement: requests sent at their times, or as earlier ones end, and a record of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from inferencex.runtime.load_test.answers import StreamedAnswer, WholeAnswer
from inferencex.runtime.load_test.api import RequestShape
from inferencex.runtime.load_test.connection import HttpClient, HttpFailure
from inferencex.runtime.load_test.prompts import Prompt
from inferencex.runtime.load_test.records import RequestRecord

_PAUSE = 0.1  # seconds after which a server that cannot be reached is tried again


@dataclass
class Measurement:
    """What a run found.

    records:      of all requests, in the order in which they were taken
    began, ended: the first request's sending, the last one's end; seconds on the clock of the records
    peak:         most requests under way at once
    cpu_seconds:  processor time that this process took meanwhile
    """

    records: list[RequestRecord] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0
    peak: int = 0
    cpu_seconds: float = 0.0


class LoadRun:
    """Sends prompts to a server, and keeps what became of them."""

    def __init__(
        self,
        client: HttpClient,
        shape: RequestShape,
        prompts: Iterator[Prompt],
        timeout: float,
        on_end: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        """Prepare; an answer may take `timeout` seconds as a whole, and `on_end` is told of each request's end."""
        self._client = client
        self._shape = shape
        self._prompts = prompts
        self._timeout = timeout
        self._on_end = on_end
        self._measurement = Measurement()
        self._under_way = 0

    async def at_concurrency(self, concurrency: int, duration: float | None = None) -> Measurement:
        """Keep `concurrency` requests under way until there are no more prompts, or for `duration` seconds.

        Requests under way after that are waited for.
        """
        began = self._begin()

        async def work() -> None:
            for prompt in self._prompts:
                record = await self._request(prompt, time.perf_counter())
                if record.error == "connect":
                    await asyncio.sleep(_PAUSE)
                if duration is not None and time.perf_counter() - began >= duration:
                    break

        async with asyncio.TaskGroup() as workers:
            for _ in range(concurrency):
                workers.create_task(work())
        return self._end()

    async def at_times(
        self, arrivals: Iterator[float], concurrency: int | None = None, duration: float | None = None
    ) -> Measurement:
        """Send each prompt at its time, in seconds from now, until there are no more, or for `duration` seconds.

        concurrency: most requests under way; one that is due beyond that waits. None: as many as come
        """
        began = self._begin()
        room = None if concurrency is None else asyncio.Semaphore(concurrency)

        async def send(prompt: Prompt, due: float) -> None:
            if room is None:
                await self._request(prompt, due)
            else:
                async with room:
                    await self._request(prompt, due)

        if duration is not None:
            arrivals = takewhile(lambda arrival: arrival < duration, arrivals)
        async with asyncio.TaskGroup() as requests:
            for arrival, prompt in zip(arrivals, self._prompts, strict=False):
                await asyncio.sleep(began + arrival - time.perf_counter())
                requests.create_task(send(prompt, began + arrival))
        return self._end()

    def _begin(self) -> float:
        self._measurement = Measurement()
        self._measurement.cpu_seconds = -time.process_time()
        self._measurement.began = time.perf_counter()
        return self._measurement.began

    def _end(self) -> Measurement:
        done = self._measurement
        done.cpu_seconds += time.process_time()
        done.ended = max((record.ended for record in done.records), default=done.began)
        done.began = min((record.sent for record in done.records), default=done.began)
        return done

    async def _request(self, prompt: Prompt, due: float) -> RequestRecord:
        run = self._measurement
        record = RequestRecord(len(run.records), prompt.tokens, due=due)
        run.records.append(record)
        answer = (StreamedAnswer if self._shape.stream else WholeAnswer)(record, prompt.max_tokens)
        request = self._client.encode("POST", self._shape.path, self._shape.body(prompt.content, prompt.max_tokens))
        self._under_way += 1
        run.peak = max(run.peak, self._under_way)
        record.sent = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout):
                await self._client.send(request, answer)
            record.ended = time.perf_counter()
            answer.finish()
        except HttpFailure as failure:
            record.fail(failure.kind, str(failure))
        except TimeoutError:
            record.fail("timeout", f"no complete answer within {self._timeout:g} s")
        finally:
            if not record.ended:
                record.ended = time.perf_counter()
            self._under_way -= 1
        if self._on_end is not None:
            self._on_end(record)
        return record

"""The service behind every protocol: admits requests, hands them to engines, and accounts for them."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from inferencex.formats.errors import InferenceXError
from inferencex.runtime.engine.constraint import ConstraintFactory
from inferencex.runtime.engine.sequence import Request
from inferencex.runtime.outputs import EmbeddingOutput, Pooling
from inferencex.runtime.params import SamplingParams
from inferencex.runtime.server.calls import Call, Caller, Observer, RequestRecord
from inferencex.runtime.server.errors import (
    InvalidRequest,
    ServiceError,
    TooManyRequests,
    Unavailable,
    told,
)
from inferencex.runtime.server.filters import Filters
from inferencex.runtime.server.generation import Deadline, Generation
from inferencex.runtime.server.models.registry import Lease, ModelRegistry
from inferencex.runtime.server.models.served import ServedModel
from inferencex.runtime.server.prompts import Prompt, read_prompt
from inferencex.runtime.structured.compiler import GrammarCompiler
from inferencex.runtime.structured.grammar import Grammar

_LOG = logging.getLogger(__name__)

_GRAMMAR_THREADS = 2
_MIN_RETRY_AFTER = 1.0
_MAX_RETRY_AFTER = 60.0
_DRAIN_RETRY_AFTER = 5.0


@dataclass(frozen=True)
class ServiceLimits:
    """What any request has to fit in; None: no limit of the service's own.

    max_queue:         requests of a model that may wait, beside those its engines work on
    max_n:             continuations of one prompt
    max_prompt_tokens: tokens of one prompt
    max_prompts:       prompts of one request, and answers to all of them together
    request_timeout:   seconds that a request may take, queue included
    stream_interval:   tokens that a piece of a stream has at least, but for the first and the last
    """

    max_queue: int = 1024
    max_n: int = 128
    max_prompt_tokens: int | None = None
    max_prompts: int = 256
    request_timeout: float | None = None
    stream_interval: int = 1


class Permit(Protocol):
    """A caller's leave to run one request."""

    def reserve(self, num_tokens: int) -> None:
        """Take that many tokens into account. Raises TooManyRequests when they are too many for now."""

    def withdraw(self) -> None:
        """End it as if nothing had been asked."""

    def release(self, num_tokens: int | None = None) -> None:
        """End it; `num_tokens` is what was used in the end."""


class Quotas(Protocol):
    """Decides whether a caller may run one more request."""

    def acquire(self, caller: Caller, num_tokens: int = 0) -> Permit:
        """Raise TooManyRequests when a quota is used up."""


@dataclass(frozen=True)
class EmbeddingBatch:
    """Vectors float32 `[hidden]` of several inputs, and how many tokens these had together."""

    vectors: Sequence[NDArray[np.float32]]
    model: ServedModel
    prompt_tokens: int


@dataclass
class _Prepared:
    call: Call
    prompt: Prompt
    request: Request
    record: RequestRecord


class _SharedPermit:
    """The permit of several generations of one request: it ends with the last of them."""

    def __init__(self, permit: Permit, generations: int) -> None:
        self._permit = permit
        self._left = generations
        self._tokens = 0

    def release(self, record: RequestRecord) -> None:
        self._left -= 1
        self._tokens += record.prompt_tokens
        if record.output is not None:
            self._tokens += record.output.metrics.num_generated_tokens
        if self._left == 0:
            self._permit.release(self._tokens)


class InferenceService:
    """Serves the models of a registry. Everything is called on one event loop."""

    def __init__(
        self,
        registry: ModelRegistry,
        quotas: Quotas,
        *,
        limits: ServiceLimits | None = None,
        filters: Filters | None = None,
        observers: Iterable[Observer] = (),
    ) -> None:
        self.registry = registry
        self.limits = ServiceLimits() if limits is None else limits
        self.filters = Filters() if filters is None else filters
        self.observers = tuple(observers)
        self._quotas = quotas
        self._ids = itertools.count()
        # A grammar may take seconds, and whoever sends many holds up nothing but other new grammars.
        self._grammar_threads = ThreadPoolExecutor(_GRAMMAR_THREADS, "grammar")
        self._running: set[Generation] = set()
        self._num_starting = 0  # requests whose prompts are being read
        self._draining = False
        self._stopped_by: ServiceError | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._recent_seconds = 1.0  # a running mean of how long requests take, for Retry-After

    @property
    def draining(self) -> bool:
        """Whether no more requests are taken."""
        return self._draining

    @property
    def num_running(self) -> int:
        """Requests under way, queued ones included."""
        return len(self._running)

    async def start(self, call: Call, caller: Caller) -> Generation:
        """Admit a request and begin it. Raises ServiceError, and holds nothing then."""
        return (await self.start_all([call], caller))[0]

    async def start_all(self, calls: Sequence[Call], caller: Caller) -> list[Generation]:
        """Admit several prompts of one request, all or none. They go to the same model."""
        record = RequestRecord(calls[0].request_id, calls[0].model or "", "", calls[0].kind, caller.name)
        self._num_starting += 1
        self._idle.clear()
        try:
            return await self._start_all(calls, caller, record)
        except InferenceXError as error:
            record.error = told(error)
            self._tell("rejected", record)
            if record.error is error:
                raise
            raise record.error from error
        finally:
            self._num_starting -= 1
            self._note_idle()

    async def embed(
        self,
        model: str | None,
        inputs: Sequence[str | Sequence[int]],
        caller: Caller,
        request_id: str,
        pooling: Pooling = "mean",
        kind: str = "embeddings",
    ) -> EmbeddingBatch:
        """Return a vector of length 1 for each input. Raises ServiceError; closing the task aborts what runs."""
        params = SamplingParams()
        calls = [Call(model, given, params, request_id, kind, pooling=pooling) for given in inputs]
        generations = await self.start_all(calls, caller)
        try:
            outputs = [await generation.result() for generation in generations]
        finally:
            for generation in generations:
                generation.close()
        vectors = [output.embedding for output in outputs if isinstance(output, EmbeddingOutput)]
        return EmbeddingBatch(vectors, generations[0].model, sum(len(output.prompt_token_ids) for output in outputs))

    def begin_drain(self) -> None:
        """Take no more requests; those under way go on."""
        self._draining = True

    async def drained(self, timeout: float | None = None) -> bool:
        """Wait until nothing is under way; False when that takes longer than `timeout` seconds."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    def end_all(self, error: ServiceError | None = None) -> None:
        """End what is under way; clients are told `error`."""
        ended = error or Unavailable(
            "the server is shutting down", code="shutting_down", retry_after=_DRAIN_RETRY_AFTER
        )
        self._stopped_by = ended  # for those whose prompts are still being read
        for generation in list(self._running):
            generation.fail(ended)

    async def _start_all(self, calls: Sequence[Call], caller: Caller, record: RequestRecord) -> list[Generation]:
        if self._draining:
            raise Unavailable(
                "the server is shutting down; send the request to another one, or again later",
                code="shutting_down",
                retry_after=_DRAIN_RETRY_AFTER,
            )
        if len(calls) > self.limits.max_prompts:
            raise InvalidRequest(
                f"{len(calls)} prompts in one request; this server takes {self.limits.max_prompts}", param="prompt"
            )
        for call in calls:
            if call.params.n > self.limits.max_n:
                raise InvalidRequest(f"n is {call.params.n}; this server takes at most {self.limits.max_n}", param="n")
        answers, most = sum(call.params.n for call in calls), max(self.limits.max_prompts, self.limits.max_n)
        if answers > most:
            raise InvalidRequest(
                f"{answers} answers to {len(calls)} prompts in one request; this server takes at most {most} together",
                param="n",
            )
        lease = self.registry.resolve(calls[0].model, caller)
        deadline = self._deadline(calls[0])
        permit: Permit | None = None
        try:
            model = lease.model
            record.model, record.version = model.name, model.version
            # Reading a prompt is work, too: who may ask nothing now does not get as far.
            self._check_queue(model, len(calls))
            permit = self._quotas.acquire(caller)
            prepared = await self._prepare_all(model, calls, caller, deadline)
            # From here on nothing waits, so that what is checked still holds when the requests are queued.
            if self._stopped_by is not None:
                raise self._stopped_by
            self._check_queue(model, len(calls))
            permit.reserve(sum(_tokens_wanted(each.request) for each in prepared))
        except BaseException:
            if permit is not None:
                permit.withdraw()
            lease.release()
            raise
        shared = _SharedPermit(permit, len(prepared))
        leases = [lease, *(lease.another() for _ in prepared[1:])]
        return [self._begin(each, shared, held, caller, deadline) for each, held in zip(prepared, leases, strict=True)]

    def _deadline(self, call: Call) -> Deadline | None:
        seconds = min((each for each in (call.timeout, self.limits.request_timeout) if each is not None), default=None)
        return None if seconds is None else Deadline(seconds, asyncio.get_running_loop().time() + seconds)

    async def _prepare_all(
        self, model: ServedModel, calls: Sequence[Call], caller: Caller, deadline: Deadline | None
    ) -> list[_Prepared]:
        prepared: list[_Prepared] = []
        try:
            async with asyncio.timeout_at(None if deadline is None else deadline.at):
                for call in calls:
                    if prepared:
                        await asyncio.sleep(0)  # many prompts take long, for which nobody else should wait
                    prepared.append(await self._prepare(model, call, caller))
        except TimeoutError as error:
            if deadline is None:
                raise
            raise deadline.passed() from error
        return prepared

    async def _prepare(self, model: ServedModel, call: Call, caller: Caller) -> _Prepared:
        llm = model.llm
        prompt = await read_prompt(llm, call)
        limit = self.limits.max_prompt_tokens
        if limit is not None and len(prompt.token_ids) > limit:
            raise InvalidRequest(
                f"the prompt has {len(prompt.token_ids)} tokens; this server takes at most {limit}",
                code="context_length_exceeded",
            )
        if self.filters.checks_input:
            await self.filters.check_input(call, caller, prompt.text or _decoded(model, prompt.token_ids))
        # A lower number is more urgent; nobody may be more urgent than the key allows.
        priority = caller.priority if call.priority is None else max(call.priority, caller.priority)
        request = await self._request(model, call, prompt, f"{call.request_id}#{next(self._ids)}", priority)
        record = RequestRecord(
            request_id=call.request_id,
            model=model.name,
            version=model.version,
            kind=call.kind,
            caller=caller.name,
            stream=call.stream,
            priority=priority,
            prompt_tokens=len(prompt.token_ids),
            trace_headers=call.trace_headers,
        )
        return _Prepared(call, prompt, request, record)

    async def _request(self, model: ServedModel, call: Call, prompt: Prompt, engine_id: str, priority: int) -> Request:
        """Return what the engine is given. Raises RequestError for what it could never serve."""
        llm = model.llm
        if call.pooling is not None:
            return llm.engine.prepare_embedding(
                engine_id, prompt.token_ids, call.pooling, prompt=prompt.text, priority=priority
            )
        constraint = None if call.grammar is None else await self._compiled(llm.grammars, call.grammar)
        return llm.engine.prepare(
            engine_id, prompt.token_ids, call.params, prompt=prompt.text, priority=priority, constraint=constraint
        )

    async def _compiled(self, compiler: GrammarCompiler, grammar: Grammar) -> ConstraintFactory:
        known = compiler.known(grammar)
        if known is not None:
            return known
        return await asyncio.get_running_loop().run_in_executor(self._grammar_threads, compiler.compile, grammar)

    def _check_queue(self, model: ServedModel, wanted: int) -> None:
        unfinished = sum(loop.num_unfinished for loop in model.loops)
        seats = sum(loop.shared.engine.options.max_num_seqs for loop in model.loops)
        # One request is always taken, whatever its number of prompts.
        if unfinished and unfinished + wanted > seats + self.limits.max_queue:
            raise TooManyRequests(
                f"{model.name} has {unfinished} requests under way, and its queue is full; try again later",
                code="queue_full",
                retry_after=min(max(self._recent_seconds * unfinished / seats, _MIN_RETRY_AFTER), _MAX_RETRY_AFTER),
            )

    def _begin(
        self, prepared: _Prepared, permit: _SharedPermit, lease: Lease, caller: Caller, deadline: Deadline | None
    ) -> Generation:
        call, record = prepared.call, prepared.record
        check = None
        if self.filters.checks_output:
            check = functools.partial(self.filters.check_output, call, caller)
        generation = Generation(
            lease.model,
            lease.model.pick(),
            prepared.request,
            record,
            [lease],
            lambda record: self._ended(generation, permit, record),
            check=check,
        )
        self._running.add(generation)
        self._idle.clear()
        self._tell("accepted", record)
        interval = self.limits.stream_interval if check is None else 1  # a filter sees text as soon as it is there
        generation.begin(every_step=call.stream or check is not None, deadline=deadline, interval=interval)
        return generation

    def _ended(self, generation: Generation, permit: _SharedPermit, record: RequestRecord) -> None:
        permit.release(record)
        self._running.discard(generation)
        self._note_idle()
        self._recent_seconds += (record.seconds - self._recent_seconds) / 16
        self._tell("finished", record)

    def _note_idle(self) -> None:
        if not self._running and not self._num_starting:
            self._idle.set()

    def _tell(self, event: Literal["accepted", "rejected", "finished"], record: RequestRecord) -> None:
        for observer in self.observers:
            try:
                getattr(observer, event)(record)
            except Exception:  # of any kind: what fails is a log or a measurement, and the request is sound
                _LOG.exception("request %s: %s failed to note it", record.request_id, type(observer).__name__)


def _tokens_wanted(request: Request) -> int:
    if request.pool is not None:
        return len(request.prompt_token_ids)
    return len(request.prompt_token_ids) + request.max_tokens * request.params.n


def _decoded(model: ServedModel, token_ids: Sequence[int]) -> str:
    return "" if model.llm.tokenizer is None else model.llm.tokenizer.decode(token_ids)

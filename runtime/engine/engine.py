"""The loop: plan a step, run it on the backend, choose tokens, end what has ended, report what is new."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from inferencex.formats.errors import BackendError, RequestError
from inferencex.runtime.backends.base import (
    ClosableExecutable,
    Executable,
    Float32Array,
    HiddenStatesExecutable,
    Int32Array,
    SamplingExecutable,
    StepBatch,
)
from inferencex.runtime.engine import admission
from inferencex.runtime.engine.block_pool import BlockPool
from inferencex.runtime.engine.closed import ClosedExecutable
from inferencex.runtime.engine.constraint import ConstraintFactory, TokenMasks, fill_masks
from inferencex.runtime.engine.launched import LaunchedStep, can_launch, launch, launch_next
from inferencex.runtime.engine.native import _sampler
from inferencex.runtime.engine.outcomes import Outcomes
from inferencex.runtime.engine.preparation import Preparation
from inferencex.runtime.engine.results import not_finite, record_prompt_logprobs
from inferencex.runtime.engine.sampler import choose_tokens
from inferencex.runtime.engine.scheduler import ScheduledChunk, Scheduler
from inferencex.runtime.engine.scheduler_options import SchedulerOptions
from inferencex.runtime.engine.sequence import Request, Status
from inferencex.runtime.engine.sequence import Sequence as EngineSequence
from inferencex.runtime.engine.stats import EngineStats
from inferencex.runtime.engine.step_batch import StepLayout, lay_out, lay_out_pooled
from inferencex.runtime.outputs import (
    CompletionDelta,
    Pooling,
    RequestOutput,
)
from inferencex.runtime.params import SamplingParams
from inferencex.runtime.text.tokenizer import Tokenizer


class Engine:
    """Serves requests on one executable, all of them together, one step at a time. Not thread-safe.

    A request's output depends on its prompt, its parameters and its seed: not on the other requests, on how
    its prompt was cut into steps, or on the prefix cache. After any finish, abort or failure the request holds
    no blocks; with nothing running every block is free (`check_integrity`).

    Without a tokenizer the engine deals in token ids alone: texts are empty and stop strings are refused.
    """

    def __init__(
        self,
        executable: Executable,
        options: SchedulerOptions | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Iterable[int] = (),
        default_params: SamplingParams | None = None,
        max_model_len: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        facts = executable.facts
        self.executable: Executable = executable
        self.options = SchedulerOptions() if options is None else options
        self.limits = admission.Limits(
            vocab_size=facts.vocab_size,
            max_model_len=facts.max_model_len if max_model_len is None else max_model_len,
            num_blocks=executable.num_blocks,
            block_size=executable.block_size,
        )
        self.default_params = SamplingParams() if default_params is None else default_params
        self.scheduler = Scheduler(
            BlockPool(executable.num_blocks, executable.block_size), self.options, facts.vocab_size
        )
        self._preparation = Preparation(
            executable=executable,
            limits=self.limits,
            tokenizer=tokenizer,
            eos_token_ids=frozenset(i for i in eos_token_ids if i < facts.vocab_size),
            default_params=self.default_params,
            shares_prefixes=self.options.enable_prefix_caching,
            clock=clock,
        )
        self._tokenizer = tokenizer
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._undelivered: list[CompletionDelta] = []
        self._num_arrivals = 0
        self._num_constrained = 0  # of the requests being served, so that others pay nothing for those that are not
        self._num_embedded = 0
        self._launched: LaunchedStep | None = None  # a step ahead of what is known
        self._last_commit = 0.0
        self._stats = EngineStats(num_kv_blocks=executable.num_blocks)
        self._outcomes = Outcomes(self.scheduler, self._stats, tokenizer, clock, self._forget)

    @property
    def has_unfinished(self) -> bool:
        """Tell whether `step` has work to do or something to report."""
        return bool(self._requests or self._undelivered)

    @property
    def stats(self) -> EngineStats:
        """A copy of the running totals."""
        return replace(
            self._stats,
            kv_blocks_used=self.scheduler.pool.num_used,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
        )

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        prompt: str | None = None,
        priority: int = 0,
        constraint: ConstraintFactory | None = None,
    ) -> None:
        """Queue a request. Raises RequestError, and queues nothing, for one that could never be served.

        `priority` counts under the "priority" policy; lower values go first.
        """
        self.submit(
            self.prepare(request_id, prompt_token_ids, params, prompt=prompt, priority=priority, constraint=constraint)
        )

    def add_embedding(
        self,
        request_id: str,
        token_ids: Sequence[int],
        pooling: Pooling = "last",
        normalize: bool = True,
        *,
        prompt: str | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a request for a prompt's embedding. Raises what `prepare_embedding` does, and queues nothing then."""
        self.submit(self.prepare_embedding(request_id, token_ids, pooling, normalize, prompt=prompt, priority=priority))

    def submit(self, request: Request) -> None:
        """Queue a prepared request; RequestError when one with its id is being served."""
        self._check_open()
        if request.id in self._requests:
            raise RequestError(f"request {request.id}: a request with this id is being served; choose another id")
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._num_constrained += request.is_constrained
        self._num_embedded += request.pool is not None
        self._requests[request.id] = request
        self.scheduler.add(request.sequences[0])

    def prepare(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        prompt: str | None = None,
        priority: int = 0,
        constraint: ConstraintFactory | None = None,
    ) -> Request:
        """Return a request for `submit`, checked and resolved; RequestError for one that could never be served.

        `constraint` makes, for each continuation, what tells the tokens it may consist of.
        """
        self._check_open()
        return self._preparation.generation(request_id, prompt_token_ids, params, prompt, priority, constraint)

    def prepare_embedding(
        self,
        request_id: str,
        token_ids: Sequence[int],
        pooling: Pooling = "last",
        normalize: bool = True,
        *,
        prompt: str | None = None,
        priority: int = 0,
    ) -> Request:
        """Return a request for `submit` whose output is an EmbeddingOutput; its last delta carries it.

        Raises RequestError for one that could never be served, and where the backend gives no hidden states.
        """
        self._check_open()
        return self._preparation.embedding(request_id, token_ids, pooling, normalize, prompt, priority)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now and return what it has so far; None when it is unknown or has finished."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        for sequence in request.sequences:
            if sequence.status is not Status.FINISHED:
                self._outcomes.end(sequence, "abort")
        return self._outcomes.close(request, None)

    def step(self) -> list[CompletionDelta]:
        """Run one step and return what it added, also what earlier failures left to report.

        An exception of the backend is raised as it is; the requests of that step are over by then, and the
        next call reports them with the finish reason "error". A request whose logits are not finite ends the
        same way, and no exception is raised, for the others are sound.
        """
        deltas, self._undelivered = self._undelivered, []
        if self._launched is not None:
            launched = self._launched
            self._run(launched.chunks, lambda: self._finish_launched(launched, deltas), deltas)
            return deltas
        chunks = self.scheduler.plan()
        if not chunks:
            if self._requests and not deltas:
                raise RuntimeError(f"{len(self._requests)} requests are unfinished and none can be scheduled")
            return deltas
        for part, run in self._parts(chunks):
            self._run(part, partial(run, part, deltas), deltas)
        return deltas

    def _run(self, chunks: Sequence[ScheduledChunk], run: Callable[[], None], deltas: list[CompletionDelta]) -> None:
        """Run a part of a step; where it fails, its requests are over, and the next step reports them."""
        try:
            run()
        except BaseException as error:  # also an interrupt must leave the pool whole; it is raised again
            self._undelivered = deltas + self._outcomes.fail_all(chunks, error)
            raise

    def close(self) -> None:
        """Let go of the model, which frees its memory; what is queued is aborted, and nothing is served any more."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self._undelivered = []
        self._launched = None
        if isinstance(self.executable, ClosableExecutable):
            self.executable.close()
        self.executable = ClosedExecutable(self.executable)
        self._preparation = replace(self._preparation, executable=self.executable)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless queues, pool and cache agree with each other."""
        self.scheduler.check_integrity()

    def _forget(self, request: Request) -> None:
        del self._requests[request.id]
        self._num_constrained -= request.is_constrained
        self._num_embedded -= request.pool is not None

    def _check_open(self) -> None:
        if isinstance(self.executable, ClosedExecutable):
            raise self.executable.error()

    def _parts(
        self, chunks: list[ScheduledChunk]
    ) -> list[tuple[list[ScheduledChunk], Callable[[list[ScheduledChunk], list[CompletionDelta]], None]]]:
        """Split a step's work by the calls of the backend that it takes."""
        if not self._num_embedded:
            return [(chunks, self._generate)]
        generated = [chunk for chunk in chunks if chunk.sequence.request.pool is None]
        embedded = [chunk for chunk in chunks if chunk.sequence.request.pool is not None]
        return [(part, run) for part, run in ((generated, self._generate), (embedded, self._embed)) if part]

    def _generate(self, chunks: list[ScheduledChunk], deltas: list[CompletionDelta]) -> None:
        started = self._clock()
        layout = lay_out(chunks, self.limits.block_size)
        if isinstance(self.executable, SamplingExecutable) and can_launch(layout):
            self._finish_launched(launch(self.executable, layout, chunks, started), deltas)
            return
        logits = self.executable.step(layout.batch)
        _check_rows("logits", logits, layout.batch, self.limits.vocab_size)
        self._commit(chunks, layout, logits, started, deltas)

    def _finish_launched(self, step: LaunchedStep, deltas: list[CompletionDelta]) -> None:
        """Launch what follows a step, if that is known, then take over the tokens of the step itself.

        Where this fails, what was launched behind it is of no use any more.
        """
        self._launched = None
        assert isinstance(self.executable, SamplingExecutable), "or nothing would have been launched"
        following = launch_next(self.executable, step, self.scheduler, self._clock())
        tokens = step.tokens.result()
        _check_tokens(tokens, len(step.sampled))
        num_tokens, num_decodes = self._advance(step.chunks, step.started)
        for sequence, token_id in zip(step.sampled, tokens.tolist(), strict=True):
            if sequence.status is Status.FINISHED:  # it ended, or its request failed, while this step ran
                continue
            if token_id < 0:
                deltas += self._outcomes.fail(sequence.request, not_finite(sequence))
            else:
                deltas.append(self._outcomes.extend(sequence, token_id, None, 0, False))
        if following is not None and any(sequence.status is Status.RUNNING for sequence in following.sampled):
            self._launched = following
        now = self._clock()
        self._stats.add_step(num_tokens - num_decodes, num_decodes, now - max(step.started, self._last_commit))
        self._last_commit = now

    def _advance(self, chunks: Sequence[ScheduledChunk], started: float) -> tuple[int, int]:
        """Take note that chunks were computed; returns how many tokens they had, and how many of them decoded."""
        num_tokens = num_decodes = 0
        self._stats.kv_blocks_peak = max(self._stats.kv_blocks_peak, self.scheduler.pool.num_used)
        for chunk in chunks:
            num_tokens += chunk.num_tokens
            num_decodes += chunk.num_tokens == 1 and chunk.sequence.num_output_tokens > 0
            metrics = chunk.sequence.request.metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = started
            if chunk.sequence.status is not Status.FINISHED:
                self.scheduler.advance(chunk)
        return num_tokens, num_decodes

    def _embed(self, chunks: list[ScheduledChunk], deltas: list[CompletionDelta]) -> None:
        started, executable = self._clock(), self.executable
        assert isinstance(executable, HiddenStatesExecutable), "or the requests would have been refused"
        batch, pooled = lay_out_pooled(chunks, self.limits.block_size)
        hidden_states = executable.hidden_states(batch)
        _check_rows("hidden states", hidden_states, batch, executable.hidden_size)
        self._stats.kv_blocks_peak = max(self._stats.kv_blocks_peak, self.scheduler.pool.num_used)
        for chunk in chunks:
            metrics = chunk.sequence.request.metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = started
            self.scheduler.advance(chunk)
        for rows in pooled:
            sequence, pool = rows.sequence, rows.sequence.request.pool
            assert pool is not None, "or the request would generate"
            values = hidden_states[rows.first_row : rows.first_row + rows.count]
            if not np.isfinite(values).all():
                deltas += self._outcomes.fail(sequence.request, not_finite(sequence, "hidden states"))
                continue
            pool.add(values)
            if rows.is_last:
                self._outcomes.end(sequence, "stop")
                deltas.append(self._outcomes.delta(sequence, "", (), None))
        self._stats.add_step(len(batch.token_ids), 0, self._clock() - started)

    def _commit(
        self,
        chunks: list[ScheduledChunk],
        layout: StepLayout,
        logits: Float32Array,
        started: float,
        deltas: list[CompletionDelta],
    ) -> None:
        """Take over a step's results and append what is new to `deltas`."""
        num_tokens, num_decodes = self._advance(chunks, started)
        for rows in layout.prompt_rows:
            if _sampler.all_finite(logits, rows.first_row, rows.count):
                record_prompt_logprobs(rows, logits, self._tokenizer)
            else:
                deltas += self._outcomes.fail(rows.sequence.request, not_finite(rows.sequence))
        masks = self._masks(layout.sampled, deltas) if self._num_constrained else None
        samplers = [sequence.sampler for sequence in layout.sampled]
        tokens = choose_tokens(logits, layout.sampled_rows, samplers, masks)
        for sequence, row, token_id in zip(layout.sampled, layout.sampled_rows, tokens, strict=True):
            if sequence.status is Status.FINISHED:  # its request failed just now
                continue
            if token_id is None:
                deltas += self._outcomes.fail(sequence.request, not_finite(sequence))
            elif sequence.constraint is None:
                deltas.append(self._outcomes.extend(sequence, token_id, logits, row, False))
            else:
                deltas += self._outcomes.extend_constrained(sequence, sequence.constraint, token_id, logits, row)
        now = self._clock()
        self._stats.add_step(num_tokens - num_decodes, num_decodes, now - started)

    def _masks(self, sampled: Sequence[EngineSequence], deltas: list[CompletionDelta]) -> TokenMasks | None:
        """Return what the constraints allow; requests whose constraint fails are over."""
        constraints = [None if sequence.status is Status.FINISHED else sequence.constraint for sequence in sampled]
        masks = fill_masks(constraints, self.limits.vocab_size)
        if masks is not None:
            for place, error in masks.failures.items():
                deltas += self._outcomes.fail(sampled[place].request, error)
        return masks


def _check_tokens(tokens: Int32Array, count: int) -> None:
    if tokens.shape != (count,) or tokens.dtype != np.int32:
        raise BackendError(f"the backend returned tokens {tokens.dtype} {list(tokens.shape)}; expected int32 [{count}]")


def _check_rows(what: str, values: Float32Array, batch: StepBatch, width: int) -> None:
    expected = (batch.logit_rows.shape[0], width)
    if values.shape != expected or values.dtype != np.float32:
        raise BackendError(
            f"the backend returned {what} {values.dtype} {list(values.shape)}; expected float32 {list(expected)}"
        )

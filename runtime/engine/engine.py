"""The loop: plan a step, run it on the backend, choose tokens, end what has ended, report what is new."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from inferencex.formats.errors import BackendError, InferenceXError, RequestError
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
from inferencex.runtime.engine.constraint import ConstraintFactory, SequenceConstraint, TokenMasks, fill_masks
from inferencex.runtime.engine.launched import LaunchedStep, can_launch, launch, launch_next
from inferencex.runtime.engine.native import _sampler
from inferencex.runtime.engine.preparation import Preparation
from inferencex.runtime.engine.results import finished_request, not_finite, record_prompt_logprobs, token_logprobs
from inferencex.runtime.engine.sampler import NOTHING_ALLOWED, choose_tokens
from inferencex.runtime.engine.scheduler import ScheduledChunk, Scheduler, SchedulerOptions
from inferencex.runtime.engine.sequence import Request, Status
from inferencex.runtime.engine.sequence import Sequence as EngineSequence
from inferencex.runtime.engine.stats import EngineStats
from inferencex.runtime.engine.step_batch import StepLayout, lay_out, lay_out_pooled
from inferencex.runtime.outputs import (
    CompletionDelta,
    FinishReason,
    Pooling,
    RequestOutput,
    TokenLogprobs,
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
                self._end(sequence, "abort")
        return self._close(request, None)

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
            self._undelivered = deltas + self._fail_all(chunks, error)
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
                deltas += self._fail(sequence.request, not_finite(sequence))
            else:
                deltas.append(self._extend(sequence, token_id, None, 0, False))
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
                deltas += self._fail(sequence.request, not_finite(sequence, "hidden states"))
                continue
            pool.add(values)
            if rows.is_last:
                self._end(sequence, "stop")
                deltas.append(self._delta(sequence, "", (), None))
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
                deltas += self._fail(rows.sequence.request, not_finite(rows.sequence))
        masks = self._masks(layout.sampled, deltas) if self._num_constrained else None
        samplers = [sequence.sampler for sequence in layout.sampled]
        tokens = choose_tokens(logits, layout.sampled_rows, samplers, masks)
        for sequence, row, token_id in zip(layout.sampled, layout.sampled_rows, tokens, strict=True):
            if sequence.status is Status.FINISHED:  # its request failed just now
                continue
            if token_id is None:
                deltas += self._fail(sequence.request, not_finite(sequence))
            elif sequence.constraint is None:
                deltas.append(self._extend(sequence, token_id, logits, row, False))
            else:
                deltas += self._extend_constrained(sequence, sequence.constraint, token_id, logits, row)
        now = self._clock()
        self._stats.add_step(num_tokens - num_decodes, num_decodes, now - started)

    def _masks(self, sampled: Sequence[EngineSequence], deltas: list[CompletionDelta]) -> TokenMasks | None:
        """Return what the constraints allow; requests whose constraint fails are over."""
        constraints = [None if sequence.status is Status.FINISHED else sequence.constraint for sequence in sampled]
        masks = fill_masks(constraints, self.limits.vocab_size)
        if masks is not None:
            for place, error in masks.failures.items():
                deltas += self._fail(sampled[place].request, error)
        return masks

    def _extend_constrained(
        self,
        sequence: EngineSequence,
        constraint: SequenceConstraint,
        token_id: int,
        logits: Float32Array,
        row: int,
    ) -> list[CompletionDelta]:
        """Do as `_extend`, and tell the constraint; where it allows nothing, end the sequence or its request."""
        try:
            if token_id != NOTHING_ALLOWED:
                return [self._extend(sequence, token_id, logits, row, constraint.accept(token_id))]
            if not constraint.may_stop:
                raise constraint.nothing_allowed()
        except InferenceXError as error:
            return self._fail(sequence.request, error)
        self._start_held(sequence)
        return [self._delta(sequence, self._end(sequence, "stop"), (), None)]

    def _extend(
        self, sequence: EngineSequence, token_id: int, logits: Float32Array | None, row: int, is_complete: bool
    ) -> CompletionDelta:
        """Append the token chosen from a row of the step's logits, and end the sequence if that ends it.

        `logits` are needed where log-probabilities are wanted.
        """
        request, params = sequence.request, sequence.request.params
        sequence.sampler.record(token_id)
        sequence.token_ids.append(token_id)
        metrics = request.metrics
        metrics.num_generated_tokens += 1
        self._stats.num_generated_tokens += 1
        if metrics.first_token_time is None:
            metrics.first_token_time = self._clock()
            self._stats.num_first_tokens += 1
            self._stats.time_to_first_token_total += metrics.first_token_time - metrics.arrival_time
        logprobs = None
        if params.logprobs is not None:
            assert logits is not None, "or the device would not have chosen"
            logprobs = token_logprobs(logits[row], token_id, params.logprobs, self._tokenizer)
            sequence.logprobs.append(logprobs)
            sequence.cumulative_logprob += logprobs[token_id].logprob
        if len(request.sequences) > 1:
            self._start_held(sequence)
        text = self._end_if_due(sequence, token_id, is_complete)
        return self._delta(sequence, text, (token_id,), None if logprobs is None else (logprobs,))

    def _start_held(self, sequence: EngineSequence) -> None:
        """Queue the continuations that waited for this one to compute the prompt."""
        for other in sequence.request.sequences:
            if other.status is Status.HELD and other is not sequence:
                self.scheduler.add(other)

    def _end_if_due(self, sequence: EngineSequence, token_id: int, is_complete: bool) -> str:
        """End the sequence if its last token does, and return the text that this token releases.

        `is_complete`: its constraint allows nothing more
        """
        request, params, stream = sequence.request, sequence.request.params, sequence.text_stream
        if token_id in request.stop_token_ids:  # the sampler chooses none before `min_tokens`
            sequence.stop_reason = token_id if token_id in params.stop_token_ids else None
            text = ""
            if stream is not None:
                if params.include_stop_str_in_output:
                    text = stream.push(token_id)
                else:
                    stream.skip()
            return text + self._end(sequence, "stop")
        text = "" if stream is None else stream.push(token_id)
        if is_complete or (stream is not None and stream.matched is not None):
            return text + self._end(sequence, "stop")
        if sequence.num_output_tokens >= request.max_tokens:
            return text + self._end(sequence, "length")
        return text

    def _end(self, sequence: EngineSequence, reason: FinishReason) -> str:
        """Finish a sequence, release its blocks, and return the text that was held back."""
        self.scheduler.finish(sequence)
        sequence.finish_reason = reason
        rest, stream = "", sequence.text_stream
        if stream is not None:
            if stream.matched is None:
                rest = stream.finish()
            if stream.matched is not None and reason in ("stop", "length"):
                sequence.finish_reason = "stop"
                sequence.stop_reason = stream.matched
        return rest

    def _delta(
        self,
        sequence: EngineSequence,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] | None,
        error: InferenceXError | None = None,
    ) -> CompletionDelta:
        request = sequence.request
        output = self._close(request, error) if sequence.finish_reason is not None and request.finished else None
        return CompletionDelta(
            request_id=request.id,
            index=sequence.index,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            output=output,
        )

    def _fail(self, request: Request, error: InferenceXError) -> list[CompletionDelta]:
        """End what is left of a request with an error; each continuation's last delta carries the reason."""
        deltas = []
        for sequence in request.sequences:
            if sequence.status is not Status.FINISHED:
                text = self._end(sequence, "error")
                deltas.append(self._delta(sequence, text, (), None, error))
        return deltas

    def _fail_all(self, chunks: Sequence[ScheduledChunk], cause: BaseException) -> list[CompletionDelta]:
        deltas = []
        for request in dict.fromkeys(chunk.sequence.request for chunk in chunks):
            if isinstance(cause, InferenceXError):
                error: InferenceXError = cause
            else:
                error = BackendError(f"request {request.id}: its step failed: {type(cause).__name__}: {cause}")
            deltas += self._fail(request, error)
        return deltas

    def _close(self, request: Request, error: InferenceXError | None) -> RequestOutput:
        """Forget a request whose sequences are all finished, and return its output."""
        del self._requests[request.id]
        self._num_constrained -= request.is_constrained
        self._num_embedded -= request.pool is not None
        metrics, stats = request.metrics, self._stats
        metrics.finished_time = self._clock()
        reasons = {sequence.finish_reason for sequence in request.sequences}
        stats.num_failed_requests += "error" in reasons
        stats.num_aborted_requests += "abort" in reasons
        stats.num_finished_requests += not reasons & {"error", "abort"}
        stats.num_preemptions += metrics.num_preemptions
        stats.num_prompt_tokens += len(request.prompt_token_ids)
        stats.num_cached_tokens += request.num_cached_tokens
        return finished_request(request, error)


def _check_tokens(tokens: Int32Array, count: int) -> None:
    if tokens.shape != (count,) or tokens.dtype != np.int32:
        raise BackendError(f"the backend returned tokens {tokens.dtype} {list(tokens.shape)}; expected int32 [{count}]")


def _check_rows(what: str, values: Float32Array, batch: StepBatch, width: int) -> None:
    expected = (batch.logit_rows.shape[0], width)
    if values.shape != expected or values.dtype != np.float32:
        raise BackendError(
            f"the backend returned {what} {values.dtype} {list(values.shape)}; expected float32 {list(expected)}"
        )

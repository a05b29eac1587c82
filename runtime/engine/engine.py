"""The loop: plan a step, run it on the backend, choose tokens, end what has ended, report what is new."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from inferencex.formats.errors import BackendError, InferenceXError, RequestError
from inferencex.runtime.backends.base import Executable, Float32Array
from inferencex.runtime.engine import admission
from inferencex.runtime.engine.block_pool import BlockPool
from inferencex.runtime.engine.native import _sampler
from inferencex.runtime.engine.results import completion, not_finite, record_prompt_logprobs, token_logprobs
from inferencex.runtime.engine.sampler import SequenceSampler, choose_tokens
from inferencex.runtime.engine.scheduler import ScheduledChunk, Scheduler, SchedulerOptions
from inferencex.runtime.engine.sequence import Request, Status
from inferencex.runtime.engine.sequence import Sequence as EngineSequence
from inferencex.runtime.engine.stats import EngineStats
from inferencex.runtime.engine.step_batch import StepLayout, lay_out
from inferencex.runtime.engine.text_stream import TextStream
from inferencex.runtime.outputs import (
    CompletionDelta,
    FinishReason,
    RequestMetrics,
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
        self.executable = executable
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
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(i for i in eos_token_ids if i < facts.vocab_size)
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._undelivered: list[CompletionDelta] = []
        self._num_arrivals = 0
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
    ) -> None:
        """Queue a request. Raises RequestError, and queues nothing, for one that could never be served.

        `priority` counts under the "priority" policy; lower values go first.
        """
        self.submit(self.prepare(request_id, prompt_token_ids, params, prompt=prompt, priority=priority))

    def submit(self, request: Request) -> None:
        """Queue a prepared request; RequestError when one with its id is being served."""
        if request.id in self._requests:
            raise RequestError(f"request {request.id}: a request with this id is being served; choose another id")
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
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
    ) -> Request:
        """Return a request for `submit`, checked and resolved; RequestError for one that could never be served."""
        name = f"request {request_id}"
        asked = SamplingParams() if params is None else params
        if not isinstance(asked, SamplingParams):
            raise RequestError(f"{name}: the parameters are {asked!r:.60}; expected SamplingParams")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(f"{name}: priority is {priority!r:.60}; expected an integer (lower ones go first)")
        resolved = asked.with_defaults(self.default_params)
        if resolved.stop and self._tokenizer is None:
            raise RequestError(
                f"{name}: stop strings need a tokenizer, and the bundle has no tokenizer; use stop_token_ids"
            )
        tokens = admission.check_prompt(name, prompt_token_ids, self.limits)
        admission.check_token_ids(name, resolved, self.limits)
        stop_ids = frozenset(resolved.stop_token_ids)
        request = Request(
            id=request_id,
            prompt=prompt,
            prompt_token_ids=tokens,
            params=resolved,
            max_tokens=admission.resolve_max_tokens(
                name, len(tokens), asked.max_tokens, resolved.max_tokens, self.limits
            ),
            stop_token_ids=stop_ids if resolved.ignore_eos else stop_ids | self._eos_token_ids,
            priority=priority,
            cache_root=admission.cache_root(
                request_id,
                len(tokens),
                resolved.n,
                self.options.enable_prefix_caching,
                self.executable.facts.length_independent_up_to,
            ),
            metrics=RequestMetrics(arrival_time=self._clock()),
            prompt_logprobs=None if resolved.prompt_logprobs is None else [None] * len(tokens),
        )
        for index in range(resolved.n):
            request.sequences.append(
                EngineSequence(
                    request=request,
                    index=index,
                    sampler=SequenceSampler(resolved, index, tokens, request.stop_token_ids),
                    text_stream=None if self._tokenizer is None else TextStream(self._tokenizer, resolved, tokens),
                    token_ids=list(tokens),
                    status=Status.HELD,
                )
            )
        return request

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
        chunks = self.scheduler.plan()
        if not chunks:
            if self._requests and not deltas:
                raise RuntimeError(f"{len(self._requests)} requests are unfinished and none can be scheduled")
            return deltas
        started = self._clock()
        try:
            layout = lay_out(chunks, self.limits.block_size)
            logits = self._run(layout)
            self._commit(chunks, layout, logits, started, deltas)
        except BaseException as error:  # also an interrupt must leave the pool whole; it is raised again
            self._undelivered = deltas + self._fail_all(chunks, error)
            raise
        return deltas

    def check_integrity(self) -> None:
        """Raise RuntimeError unless queues, pool and cache agree with each other."""
        self.scheduler.check_integrity()

    def _run(self, layout: StepLayout) -> Float32Array:
        logits = self.executable.step(layout.batch)
        expected = (layout.batch.logit_rows.shape[0], self.limits.vocab_size)
        if logits.shape != expected or logits.dtype != np.float32:
            raise BackendError(
                f"the backend returned logits {logits.dtype} {list(logits.shape)}; expected float32 {list(expected)}"
            )
        return logits

    def _commit(
        self,
        chunks: list[ScheduledChunk],
        layout: StepLayout,
        logits: Float32Array,
        started: float,
        deltas: list[CompletionDelta],
    ) -> None:
        """Take over a step's results and append what is new to `deltas`."""
        num_tokens = num_decodes = 0
        self._stats.kv_blocks_peak = max(self._stats.kv_blocks_peak, self.scheduler.pool.num_used)
        for chunk in chunks:
            num_tokens += chunk.num_tokens
            num_decodes += chunk.num_tokens == 1 and chunk.sequence.num_output_tokens > 0
            metrics = chunk.sequence.request.metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = started
            self.scheduler.advance(chunk)
        for rows in layout.prompt_rows:
            if _sampler.all_finite(logits, rows.first_row, rows.count):
                record_prompt_logprobs(rows, logits, self._tokenizer)
            else:
                deltas += self._fail(rows.sequence.request, not_finite(rows.sequence))
        tokens = choose_tokens(logits, layout.sampled_rows, [sequence.sampler for sequence in layout.sampled])
        for sequence, row, token_id in zip(layout.sampled, layout.sampled_rows, tokens, strict=True):
            if sequence.status is Status.FINISHED:  # its request failed just now
                continue
            if token_id is None:
                deltas += self._fail(sequence.request, not_finite(sequence))
            else:
                deltas.append(self._extend(sequence, token_id, logits, row))
        now = self._clock()
        self._stats.add_step(num_tokens - num_decodes, num_decodes, now - started)

    def _extend(self, sequence: EngineSequence, token_id: int, logits: Float32Array, row: int) -> CompletionDelta:
        """Append the token chosen from a row of the step's logits, and end the sequence if that ends it."""
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
            logprobs = token_logprobs(logits[row], token_id, params.logprobs, self._tokenizer)
            sequence.logprobs.append(logprobs)
            sequence.cumulative_logprob += logprobs[token_id].logprob
        if len(request.sequences) > 1:
            for other in request.sequences:
                if other.status is Status.HELD and other is not sequence:
                    self.scheduler.add(other)
        text = self._end_if_due(sequence, token_id)
        return self._delta(sequence, text, (token_id,), None if logprobs is None else (logprobs,))

    def _end_if_due(self, sequence: EngineSequence, token_id: int) -> str:
        """End the sequence if its last token does, and return the text that this token releases."""
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
        if stream is not None and stream.matched is not None:
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

    def _fail_all(self, chunks: list[ScheduledChunk], cause: BaseException) -> list[CompletionDelta]:
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
        metrics, stats = request.metrics, self._stats
        metrics.finished_time = self._clock()
        outputs = tuple(completion(sequence) for sequence in request.sequences)
        reasons = {output.finish_reason for output in outputs}
        stats.num_failed_requests += "error" in reasons
        stats.num_aborted_requests += "abort" in reasons
        stats.num_finished_requests += not reasons & {"error", "abort"}
        stats.num_preemptions += metrics.num_preemptions
        stats.num_prompt_tokens += len(request.prompt_token_ids)
        stats.num_cached_tokens += request.num_cached_tokens
        return RequestOutput(
            request_id=request.id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=outputs,
            prompt_logprobs=None if request.prompt_logprobs is None else tuple(request.prompt_logprobs),
            num_cached_tokens=request.num_cached_tokens,
            metrics=metrics,
            error=error,
        )

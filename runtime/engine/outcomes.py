"""What becomes of a sequence: it grows by a token, ends, or fails; and what its request's reader is told of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inferencex.formats.errors import BackendError, InferenceXError
from inferencex.runtime.backends.base import Float32Array
from inferencex.runtime.engine.constraint import SequenceConstraint
from inferencex.runtime.engine.results import finished_request, token_logprobs
from inferencex.runtime.engine.sampler import NOTHING_ALLOWED
from inferencex.runtime.engine.scheduler import ScheduledChunk, Scheduler
from inferencex.runtime.engine.sequence import Request, Status
from inferencex.runtime.engine.sequence import Sequence as EngineSequence
from inferencex.runtime.engine.stats import EngineStats
from inferencex.runtime.outputs import CompletionDelta, FinishReason, RequestOutput, TokenLogprobs
from inferencex.runtime.text.tokenizer import Tokenizer


class Outcomes:
    """Grows and ends sequences. Whatever ends one releases its blocks first.

    forget: called with each request whose sequences are all finished, before its output is made
    """

    def __init__(
        self,
        scheduler: Scheduler,
        stats: EngineStats,
        tokenizer: Tokenizer | None,
        clock: Callable[[], float],
        forget: Callable[[Request], None],
    ) -> None:
        self._scheduler, self._stats, self._tokenizer = scheduler, stats, tokenizer
        self._clock, self._forget = clock, forget

    def extend_constrained(
        self,
        sequence: EngineSequence,
        constraint: SequenceConstraint,
        token_id: int,
        logits: Float32Array,
        row: int,
    ) -> list[CompletionDelta]:
        """Do as `extend`, and tell the constraint; where it allows nothing, end the sequence or its request."""
        try:
            if token_id != NOTHING_ALLOWED:
                return [self.extend(sequence, token_id, logits, row, constraint.accept(token_id))]
            if not constraint.may_stop:
                raise constraint.nothing_allowed()
        except InferenceXError as error:
            return self.fail(sequence.request, error)
        self._start_held(sequence)
        return [self.delta(sequence, self.end(sequence, "stop"), (), None)]

    def extend(
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
        return self.delta(sequence, text, (token_id,), None if logprobs is None else (logprobs,))

    def _start_held(self, sequence: EngineSequence) -> None:
        """Queue the continuations that waited for this one to compute the prompt."""
        for other in sequence.request.sequences:
            if other.status is Status.HELD and other is not sequence:
                self._scheduler.add(other)

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
            return text + self.end(sequence, "stop")
        text = "" if stream is None else stream.push(token_id)
        if is_complete or (stream is not None and stream.matched is not None):
            return text + self.end(sequence, "stop")
        if sequence.num_output_tokens >= request.max_tokens:
            return text + self.end(sequence, "length")
        return text

    def end(self, sequence: EngineSequence, reason: FinishReason) -> str:
        """Finish a sequence, release its blocks, and return the text that was held back."""
        self._scheduler.finish(sequence)
        sequence.finish_reason = reason
        rest, stream = "", sequence.text_stream
        if stream is not None:
            if stream.matched is None:
                rest = stream.finish()
            if stream.matched is not None and reason in ("stop", "length"):
                sequence.finish_reason = "stop"
                sequence.stop_reason = stream.matched
        return rest

    def delta(
        self,
        sequence: EngineSequence,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] | None,
        error: InferenceXError | None = None,
    ) -> CompletionDelta:
        """Return what is new of a sequence; with its request's output where that is over with it."""
        request = sequence.request
        output = self.close(request, error) if sequence.finish_reason is not None and request.finished else None
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

    def fail(self, request: Request, error: InferenceXError) -> list[CompletionDelta]:
        """End what is left of a request with an error; each continuation's last delta carries the reason."""
        deltas = []
        for sequence in request.sequences:
            if sequence.status is not Status.FINISHED:
                text = self.end(sequence, "error")
                deltas.append(self.delta(sequence, text, (), None, error))
        return deltas

    def fail_all(self, chunks: Sequence[ScheduledChunk], cause: BaseException) -> list[CompletionDelta]:
        """End every request of a step that failed."""
        deltas = []
        for request in dict.fromkeys(chunk.sequence.request for chunk in chunks):
            if isinstance(cause, InferenceXError):
                error: InferenceXError = cause
            else:
                error = BackendError(f"request {request.id}: its step failed: {type(cause).__name__}: {cause}")
            deltas += self.fail(request, error)
        return deltas

    def close(self, request: Request, error: InferenceXError | None) -> RequestOutput:
        """Forget a request whose sequences are all finished, and return its output."""
        self._forget(request)
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

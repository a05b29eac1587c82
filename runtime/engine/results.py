"""Puts together what the engine reports: log-probabilities, finished continuations, errors."""

from __future__ import annotations

from inferencex.formats.errors import BackendError, InferenceXError
from inferencex.runtime.backends.base import Float32Array
from inferencex.runtime.engine.logprobs import ranked_logprobs
from inferencex.runtime.engine.sequence import Request, Sequence
from inferencex.runtime.engine.step_batch import PromptRows
from inferencex.runtime.outputs import CompletionOutput, EmbeddingOutput, Logprob, RequestOutput, TokenLogprobs
from inferencex.runtime.text.tokenizer import Tokenizer


def token_logprobs(logits: Float32Array, token_id: int, count: int, tokenizer: Tokenizer | None) -> TokenLogprobs:
    """Return log-probabilities of the chosen token and of the `count` most likely ones, from logits [V]."""
    entries = {}
    for ranked in ranked_logprobs(logits, token_id, count):
        text = None if tokenizer is None else tokenizer.decode([ranked.token_id], skip_special_tokens=False)
        entries[ranked.token_id] = Logprob(ranked.logprob, ranked.rank, text)
    return entries


def record_prompt_logprobs(rows: PromptRows, logits: Float32Array, tokenizer: Tokenizer | None) -> None:
    """Fill in a piece of a request's prompt log-probabilities from the logits [R, V] of a step."""
    request = rows.sequence.request
    if request.prompt_logprobs is None or request.params.prompt_logprobs is None:
        return
    for offset in range(rows.count):
        position = rows.first_position + offset
        request.prompt_logprobs[position] = token_logprobs(
            logits[rows.first_row + offset],
            request.prompt_token_ids[position],
            request.params.prompt_logprobs,
            tokenizer,
        )


def completion(sequence: Sequence) -> CompletionOutput:
    """Return the result of a finished sequence."""
    stream, params = sequence.text_stream, sequence.request.params
    if sequence.finish_reason is None:
        raise RuntimeError(f"continuation {sequence.index} of request {sequence.request.id} has not finished")
    return CompletionOutput(
        index=sequence.index,
        text="" if stream is None else stream.text,
        token_ids=tuple(sequence.output_token_ids),
        text_offsets=() if stream is None else stream.offsets,
        cumulative_logprob=None if params.logprobs is None else sequence.cumulative_logprob,
        logprobs=None if params.logprobs is None else tuple(sequence.logprobs),
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
    )


def finished_request(request: Request, error: InferenceXError | None) -> RequestOutput:
    """Return the output of a request whose sequences have all finished."""
    if request.pool is not None:
        is_complete = error is None and all(sequence.finish_reason == "stop" for sequence in request.sequences)
        return EmbeddingOutput(
            request_id=request.id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=(),
            prompt_logprobs=None,
            num_cached_tokens=request.num_cached_tokens,
            metrics=request.metrics,
            error=error,
            **({"embedding": request.pool.result()} if is_complete else {}),
        )
    return RequestOutput(
        request_id=request.id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=tuple(completion(sequence) for sequence in request.sequences),
        prompt_logprobs=None if request.prompt_logprobs is None else tuple(request.prompt_logprobs),
        num_cached_tokens=request.num_cached_tokens,
        metrics=request.metrics,
        error=error,
    )


def not_finite(sequence: Sequence, what: str = "logits") -> BackendError:
    """Return the error of a sequence whose logits, or `what` else was computed, hold NaN or infinity."""
    return BackendError(
        f"request {sequence.request.id}: the model's {what} after {len(sequence.token_ids)} tokens are not finite; "
        "its weights or activations overflow, so nothing can be made of them"
    )

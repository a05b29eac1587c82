"""From what the engine gives to messages of `inference.proto`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from inferencex.runtime.outputs import (
    CompletionDelta,
    CompletionOutput,
    Logprob,
    RequestOutput,
    TokenLogprobs,
)
from inferencex.runtime.server.errors import Failed
from inferencex.runtime.server.generation import Generation
from inferencex.runtime.server.grpc.v1 import inference_pb2 as pb
from inferencex.runtime.server.models.served import ServedModel

_FINISH_REASONS: dict[str | None, pb.FinishReason] = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "tool_calls": pb.FINISH_REASON_TOOL_CALLS,
    "abort": pb.FINISH_REASON_ABORT,
}


def finish_reason(reason: str | None) -> pb.FinishReason:
    """Return the reason as the interface names it."""
    return _FINISH_REASONS[reason]


def usage(output: RequestOutput) -> pb.Usage:
    """Return the tokens that a finished request took."""
    return pb.Usage(
        prompt_tokens=len(output.prompt_token_ids),
        cached_tokens=output.num_cached_tokens,
        completion_tokens=output.metrics.num_generated_tokens,
    )


def position_logprobs(tokens: Sequence[TokenLogprobs | None] | None, count: int | None) -> list[pb.PositionLogprobs]:
    """Return log-probabilities position by position, with the `count` most likely tokens of each."""
    return [pb.PositionLogprobs() if position is None else _position(position, count or 0) for position in tokens or ()]


def generate_response(generation: Generation, output: RequestOutput) -> pb.GenerateResponse:
    """Return the whole answer of Generate."""
    return pb.GenerateResponse(
        id=generation.request_id,
        model=generation.model.name,
        created=generation.created,
        choices=[_choice(each, generation.params.logprobs) for each in output.outputs],
        usage=usage(output),
        prompt_logprobs=position_logprobs(output.prompt_logprobs, generation.params.prompt_logprobs),
    )


def started(generation: Generation) -> pb.StreamStarted:
    """Return the first message of a stream."""
    return pb.StreamStarted(
        id=generation.request_id,
        model=generation.model.name,
        created=generation.created,
        prompt_tokens=len(generation.prompt_token_ids),
    )


def generate_delta(delta: CompletionDelta, num_logprobs: int | None) -> pb.GenerateDelta:
    """Return what one step added to one continuation."""
    message = pb.GenerateDelta(
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=position_logprobs(delta.logprobs, num_logprobs),
        finish_reason=finish_reason(delta.finish_reason),
    )
    set_stop_reason(message, delta.stop_reason)
    return message


def finished(generation: Generation) -> pb.StreamFinished:
    """Return the last message of a stream that has come to its end; Failed for one that was ended before."""
    output = generation.output
    if output is None:
        raise Failed("the request was ended before it was done")
    return pb.StreamFinished(
        usage=usage(output),
        prompt_logprobs=position_logprobs(output.prompt_logprobs, generation.params.prompt_logprobs),
    )


def model_message(model: ServedModel) -> pb.Model:
    """Return a model as ListModels describes it."""
    return pb.Model(
        name=model.name,
        aliases=model.aliases,
        version=model.version,
        created=model.created,
        max_model_len=model.max_model_len,
        supports_chat=bool(model.chat_template),
        supports_text=model.tokenizer is not None,
    )


def set_stop_reason(
    message: pb.GenerateChoice | pb.GenerateDelta | pb.ChatChoice | pb.ChatDelta, reason: int | str | None
) -> None:
    """Say what ended a continuation, if it was something the request named."""
    if isinstance(reason, str):
        message.stop_string = reason
    elif reason is not None:
        message.stop_token_id = reason


def _choice(output: CompletionOutput, logprobs: int | None) -> pb.GenerateChoice:
    choice = pb.GenerateChoice(
        index=output.index,
        text=output.text,
        token_ids=output.token_ids,
        logprobs=position_logprobs(output.logprobs, logprobs),
        finish_reason=finish_reason(output.finish_reason),
    )
    set_stop_reason(choice, output.stop_reason)
    return choice


def _position(tokens: TokenLogprobs, count: int) -> pb.PositionLogprobs:
    entries = [_logprob(token_id, logprob) for token_id, logprob in tokens.items()]
    return pb.PositionLogprobs(chosen=entries[0], top=_most_likely(entries, count))


def _most_likely(entries: Iterable[pb.Logprob], count: int) -> list[pb.Logprob]:
    """Return the `count` most likely of the entries; of equally likely ones the chosen token goes first."""
    return sorted(entries, key=lambda entry: entry.rank)[:count]


def _logprob(token_id: int, logprob: Logprob) -> pb.Logprob:
    return pb.Logprob(token_id=token_id, logprob=logprob.logprob, rank=logprob.rank, token=logprob.decoded_token or "")

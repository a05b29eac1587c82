"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from inferencex.runtime.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from inferencex.runtime.server.calls import Call
from inferencex.runtime.server.errors import InvalidRequest
from inferencex.runtime.server.generation import Generation
from inferencex.runtime.server.openai.answers import STREAMED, as_json, gone
from inferencex.runtime.server.openai.clients import ClientGoneError, whole
from inferencex.runtime.server.openai.completion_stream import CompletionStream
from inferencex.runtime.server.openai.context import Context, require_tokenizer
from inferencex.runtime.server.openai.grammars import requested_grammar
from inferencex.runtime.server.openai.logprobs import completion_logprobs
from inferencex.runtime.server.openai.prompts import as_prompts
from inferencex.runtime.server.openai.protocol.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from inferencex.runtime.server.openai.protocol.errors import ERROR_RESPONSES
from inferencex.runtime.server.openai.protocol.usage import Usage
from inferencex.runtime.server.openai.route import StrictRoute
from inferencex.runtime.server.openai.sampling import sampling_params
from inferencex.runtime.server.openai.sse import EventStream
from inferencex.runtime.server.openai.token_texts import prompt_text
from inferencex.runtime.text.tokenizer import Tokenizer

_MAX_TOKENS = 16  # OpenAI's default

router = APIRouter(route_class=StrictRoute, strict_content_type=False)


@router.post(
    "/v1/completions",
    tags=["generation"],
    summary="Continue texts",
    response_model=None,
    responses={**ERROR_RESPONSES, 200: {"model": Completion, **STREAMED}},
)
async def complete(body: CompletionRequest, request: Request) -> Response:
    """Continue one prompt or several, each `n` times."""
    context = Context.of(request)
    generations = await context.service.start_all(completion_calls(body, context), context.caller)
    identifier = f"cmpl-{context.request_id}"
    if body.stream:
        return EventStream(CompletionStream(body, generations, identifier).pieces(), generations)
    try:
        outputs = await whole(request, generations)
    except ClientGoneError:
        return gone()
    return as_json(_completion(body, generations, outputs, identifier))


def completion_calls(body: CompletionRequest, context: Context) -> list[Call]:
    """Return a call for each prompt. Raises InvalidRequest for fields that do not go together."""
    n = 1 if body.n is None else body.n
    best_of = n if body.best_of is None else body.best_of
    if best_of < n:
        raise InvalidRequest(f"best_of={best_of} is less than n={n}; it must be at least n", param="best_of")
    if body.stream and best_of > n:
        raise InvalidRequest(
            "the best of several answers is known at the end: best_of cannot be streamed", param="best_of"
        )
    if body.stream and body.echo and body.logprobs is not None:
        raise InvalidRequest("echo with logprobs cannot be streamed; set stream to false", param="echo")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is for streams; set stream to true", param="stream_options")
    logprobs = body.logprobs
    if best_of > n and logprobs is None:
        logprobs = 0
    params = sampling_params(
        body,
        n=best_of,
        # The engine generates one token at least; one that nobody asked for is left out of the answer.
        max_tokens=max(1, _MAX_TOKENS if body.max_tokens is None else body.max_tokens),
        logprobs=logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    if logprobs is not None or body.echo:
        require_tokenizer(context.model(body.model), "logprobs" if not body.echo else "echo")
    prompts = as_prompts(body.prompt)
    grammar = requested_grammar(body)
    return [
        Call(
            model=body.model,
            prompt=prompt,
            params=params,
            request_id=context.request_id if len(prompts) == 1 else f"{context.request_id}-{place}",
            kind="completions",
            priority=body.priority,
            grammar=grammar,
            add_special_tokens=body.add_special_tokens is not False,
            stream=bool(body.stream),
            timeout=body.timeout,
            trace_headers=context.trace_headers,
        )
        for place, prompt in enumerate(prompts)
    ]


def _completion(
    body: CompletionRequest, generations: Sequence[Generation], outputs: Sequence[RequestOutput], identifier: str
) -> Completion:
    n = 1 if body.n is None else body.n
    choices: list[CompletionChoice] = []
    for generation, output in zip(generations, outputs, strict=True):
        tokenizer = generation.model.tokenizer
        echoed = prompt_text(tokenizer, output.prompt_token_ids, output.prompt) if body.echo and tokenizer else None
        for answer in _best(output.outputs, n):
            choices.append(_choice(body, tokenizer, output, answer, echoed, len(choices)))
    unwanted = sum(len(output.outputs) for output in outputs) if body.max_tokens == 0 else 0
    return Completion(
        id=identifier,
        created=generations[0].created,
        model=generations[0].model.name,
        choices=choices,
        usage=Usage.of(outputs, unwanted),
    )


def _best(answers: Sequence[CompletionOutput], n: int) -> Sequence[CompletionOutput]:
    """Return the n answers with the highest mean log-probability of a token, the best one first."""
    if len(answers) == n:
        return answers
    return sorted(answers, key=lambda each: -(each.cumulative_logprob or 0.0) / max(1, len(each.token_ids)))[:n]


def _choice(
    body: CompletionRequest,
    tokenizer: Tokenizer | None,
    output: RequestOutput,
    answer: CompletionOutput,
    echoed: tuple[str, list[int]] | None,
    index: int,
) -> CompletionChoice:
    """Return one answer; `echoed` is the prompt that it begins with, and where each of its tokens is."""
    text, ids = (answer.text, answer.token_ids) if body.max_tokens != 0 else ("", ())
    if echoed is not None:
        # With log-probabilities the text is what the tokens spell, so that their offsets are right.
        text = (echoed[0] if body.logprobs is not None or output.prompt is None else output.prompt) + text
    return CompletionChoice(
        index=index,
        text=text,
        logprobs=None if tokenizer is None else _logprobs(body, tokenizer, output, answer, echoed),
        finish_reason="stop" if answer.finish_reason == "stop" and body.max_tokens != 0 else "length",
        stop_reason=answer.stop_reason,
        token_ids=list(ids) if body.return_token_ids else None,
        prompt_token_ids=list(output.prompt_token_ids) if body.return_token_ids else None,
    )


def _logprobs(
    body: CompletionRequest,
    tokenizer: Tokenizer,
    output: RequestOutput,
    answer: CompletionOutput,
    echoed: tuple[str, list[int]] | None,
) -> CompletionLogprobs | None:
    """Return the log-probabilities of an answer, those of the prompt in front where it is echoed."""
    if body.logprobs is None or answer.logprobs is None:
        return None
    entries: list[TokenLogprobs | None] = list(answer.logprobs)
    offsets, ids = list(answer.text_offsets), list(answer.token_ids)
    if body.max_tokens == 0:
        entries, offsets, ids = [], [], []
    if echoed is not None and output.prompt_logprobs is not None:
        spelled, places = echoed
        entries = [*output.prompt_logprobs, *entries]
        offsets = [*places, *(len(spelled) + offset for offset in offsets)]
        ids = [*output.prompt_token_ids, *ids]
    return completion_logprobs(tokenizer, entries, offsets, ids)

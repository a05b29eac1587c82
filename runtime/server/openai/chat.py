"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request, Response

from inferencex.runtime.outputs import CompletionOutput, RequestOutput
from inferencex.runtime.server.generation import Generation
from inferencex.runtime.server.openai.answer_parser import Answer, parse_answer
from inferencex.runtime.server.openai.answers import STREAMED, as_json, gone
from inferencex.runtime.server.openai.chat_stream import ChatStream
from inferencex.runtime.server.openai.clients import ClientGoneError, whole
from inferencex.runtime.server.openai.context import Context
from inferencex.runtime.server.openai.conversation import Conversation, conversation
from inferencex.runtime.server.openai.logprobs import chat_logprobs
from inferencex.runtime.server.openai.protocol.chat import (
    AnsweredFunction,
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatRequest,
    ChoiceLogprobs,
    ToolCall,
)
from inferencex.runtime.server.openai.protocol.errors import ERROR_RESPONSES
from inferencex.runtime.server.openai.protocol.usage import Usage
from inferencex.runtime.server.openai.route import StrictRoute
from inferencex.runtime.server.openai.sse import EventStream

router = APIRouter(route_class=StrictRoute, strict_content_type=False)


@router.post(
    "/v1/chat/completions",
    tags=["generation"],
    summary="Answer a conversation",
    response_model=None,
    responses={**ERROR_RESPONSES, 200: {"model": ChatCompletion, **STREAMED}},
)
async def chat(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation, `n` times."""
    context = Context.of(request)
    read = conversation(context, body, "chat")
    generation = await context.service.start(read.call, context.caller)
    identifier = f"chatcmpl-{context.request_id}"
    if body.stream:
        return EventStream(ChatStream(body, read, generation, identifier).pieces(), [generation])
    try:
        [output] = await whole(request, [generation])
    except ClientGoneError:
        return gone()
    return as_json(
        ChatCompletion(
            id=identifier,
            created=generation.created,
            model=generation.model.name,
            choices=[_choice(body, read, generation, answer) for answer in output.outputs],
            usage=Usage.of([output]),
            prompt_token_ids=_prompt_ids(body, output),
        )
    )


def read_answer(chat: Conversation, generation: Generation, text: str) -> Answer:
    """Part a whole answer into reasoning, content and calls."""
    parser = chat.parser(generation)
    return Answer(content=text) if parser is None else parse_answer(parser, text)


def _choice(body: ChatRequest, chat: Conversation, generation: Generation, output: CompletionOutput) -> ChatChoice:
    answer = read_answer(chat, generation, output.text)
    calls = [
        ToolCall(id=call.id, function=AnsweredFunction(name=call.name, arguments=call.arguments))
        for call in answer.calls
    ]
    reason: Literal["stop", "length", "tool_calls"] = "length" if output.finish_reason == "length" else "stop"
    tokenizer = generation.model.tokenizer
    logprobs = None
    if output.logprobs is not None and tokenizer is not None:
        logprobs = ChoiceLogprobs(
            content=chat_logprobs(tokenizer, output.logprobs, output.token_ids, body.top_logprobs or 0)
        )
    return ChatChoice(
        index=output.index,
        message=AnswerMessage(
            content=answer.content, reasoning_content=answer.reasoning, tool_calls=calls if calls else None
        ),
        logprobs=logprobs,
        finish_reason="tool_calls" if calls and reason == "stop" else reason,
        stop_reason=output.stop_reason,
        token_ids=list(output.token_ids) if body.return_token_ids else None,
    )


def _prompt_ids(body: ChatRequest, output: RequestOutput) -> list[int] | None:
    return list(output.prompt_token_ids) if body.return_token_ids else None

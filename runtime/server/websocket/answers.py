"""What a generation says on a socket: the chunks of the HTTP API's streams, as messages."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import ValidationError

from inferencex.runtime.server.errors import Failed
from inferencex.runtime.server.generation import Generation
from inferencex.runtime.server.openai.chat_stream import ChatStream
from inferencex.runtime.server.openai.completion_stream import CompletionStream
from inferencex.runtime.server.openai.completions import completion_calls
from inferencex.runtime.server.openai.context import Context
from inferencex.runtime.server.openai.conversation import conversation
from inferencex.runtime.server.openai.protocol.chat import ChatRequest
from inferencex.runtime.server.openai.protocol.completions import CompletionRequest
from inferencex.runtime.server.openai.protocol.sampling import SamplingFields
from inferencex.runtime.server.openai.validation import invalid_request
from inferencex.runtime.server.websocket.frames import Message

Body = TypeVar("Body", bound=SamplingFields)
Answers = AsyncGenerator[dict[str, Any], None]

_ALWAYS: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
_DATA = "data: "
_END = "[DONE]"


def answers(context: Context, message: Message) -> Answers:
    """Yield what is answered to a message of type "generate" or "chat", less the id: accepted, deltas, done.

    Raises ServiceError. Closing the iterator ends the generation at once.
    """
    return _chat(context, message) if message.type == "chat" else _generate(context, message)


async def _generate(context: Context, message: Message) -> Answers:
    body = _read(CompletionRequest, message)
    calls = [replace(call, kind="websocket.generate") for call in completion_calls(body, context)]
    generations = await context.service.start_all(calls, context.caller)
    try:
        pieces = CompletionStream(body, generations, context.request_id).pieces()
        async with aclosing(_answers(context, generations, pieces)) as found:
            async for answer in found:
                yield answer
    finally:
        _close(generations)


async def _chat(context: Context, message: Message) -> Answers:
    body = _read(ChatRequest, message)
    chat = conversation(context, body, "websocket.chat")
    generation = await context.service.start(chat.call, context.caller)
    try:
        pieces = ChatStream(body, chat, generation, context.request_id).pieces()
        async with aclosing(_answers(context, [generation], pieces)) as found:
            async for answer in found:
                yield answer
    finally:
        _close([generation])


async def _answers(context: Context, generations: Sequence[Generation], pieces: AsyncGenerator[bytes, None]) -> Answers:
    first = generations[0]
    yield {
        "type": "accepted",
        "request_id": context.request_id,
        "model": first.model.name,
        "created": first.created,
    }
    usage = None
    async with aclosing(pieces) as stream:
        async for piece in stream:
            for chunk in _chunks(piece):
                if chunk["choices"]:
                    yield {"type": "delta", "choices": chunk["choices"]}
                else:
                    usage = chunk["usage"]
    if usage is None:
        raise Failed("the request was ended before it was done")
    yield {"type": "done", "usage": usage}


def _chunks(piece: bytes) -> Iterator[dict[str, Any]]:
    """Yield the chunks in a piece of a stream, which is framed for server-sent events."""
    for event in piece.decode("ascii").split("\n\n"):
        data = event.removeprefix(_DATA)
        if data and data != _END:
            yield json.loads(data)


def _read(model: type[Body], message: Message) -> Body:
    """Return the fields of a message as the HTTP API's body; it is always streamed, and ends with the usage."""
    try:
        return model.model_validate({**message.fields, **_ALWAYS})
    except ValidationError as error:
        problems: list[Mapping[str, Any]] = [
            {**problem, "loc": ("body", *problem["loc"])} for problem in error.errors(include_url=False)
        ]
        raise invalid_request(problems, model) from error


def _close(generations: Sequence[Generation]) -> None:
    for generation in generations:
        generation.close()

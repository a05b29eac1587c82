"""`POST /v1/responses`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from inferencex.runtime.server.openai.answers import STREAMED, as_json, gone
from inferencex.runtime.server.openai.chat import read_answer
from inferencex.runtime.server.openai.clients import ClientGoneError, whole
from inferencex.runtime.server.openai.context import Context
from inferencex.runtime.server.openai.conversation import conversation
from inferencex.runtime.server.openai.protocol.errors import ERROR_RESPONSES
from inferencex.runtime.server.openai.protocol.responses import ResponseObject, ResponsesRequest
from inferencex.runtime.server.openai.responses_input import as_chat
from inferencex.runtime.server.openai.responses_object import ResponseMaker
from inferencex.runtime.server.openai.responses_stream import ResponseStream
from inferencex.runtime.server.openai.route import StrictRoute
from inferencex.runtime.server.openai.sse import EventStream

router = APIRouter(route_class=StrictRoute, strict_content_type=False)


@router.post(
    "/v1/responses",
    tags=["generation"],
    summary="Answer, in the form of the Responses API",
    response_model=None,
    responses={**ERROR_RESPONSES, 200: {"model": ResponseObject, **STREAMED}},
)
async def respond(body: ResponsesRequest, request: Request) -> Response:
    """Answer a text or a conversation. Nothing is stored: each request holds the whole conversation."""
    context = Context.of(request)
    chat = conversation(context, as_chat(body), "responses")
    generation = await context.service.start(chat.call, context.caller)
    maker = ResponseMaker(body, generation, context.request_id)
    if body.stream:
        stream = ResponseStream(maker, generation, chat.parser(generation), body.top_logprobs or 0)
        return EventStream(stream.pieces(), [generation], stream.failure)
    try:
        [output] = await whole(request, [generation])
    except ClientGoneError:
        return gone()
    answer = read_answer(chat, generation, output.outputs[0].text)
    return as_json(maker.make("completed", maker.items(answer, output), output))

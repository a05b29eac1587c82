"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from inferencex.runtime.server.calls import Chat
from inferencex.runtime.server.errors import InvalidRequest
from inferencex.runtime.server.models.served import ServedModel
from inferencex.runtime.server.openai.answers import as_json
from inferencex.runtime.server.openai.context import Context, require_tokenizer
from inferencex.runtime.server.openai.messages import template_messages, template_tools, template_variables
from inferencex.runtime.server.openai.protocol.errors import ERROR_RESPONSES
from inferencex.runtime.server.openai.protocol.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from inferencex.runtime.server.openai.route import StrictRoute
from inferencex.runtime.server.openai.token_texts import token_texts
from inferencex.runtime.server.prompts import render_chat

router = APIRouter(route_class=StrictRoute, strict_content_type=False)


@router.post(
    "/tokenize",
    tags=["tokens"],
    summary="Text to token ids",
    response_model=None,
    responses={**ERROR_RESPONSES, 200: {"model": TokenizeResponse}},
)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Return the token ids of a text, or of a conversation as the model reads it."""
    context = Context.of(request)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give prompt or messages, one of them", param="prompt")
    with context.service.registry.resolve(body.model, context.caller) as lease:
        model = lease.model
        tokens = await asyncio.to_thread(_encode, model, body)
        texts = token_texts(require_tokenizer(model, "prompt"))
        return as_json(
            TokenizeResponse(
                count=len(tokens),
                max_model_len=model.max_model_len,
                tokens=tokens,
                token_strs=[texts.text_of(token) for token in tokens] if body.return_token_strs else None,
            )
        )


@router.post(
    "/detokenize",
    tags=["tokens"],
    summary="Token ids to text",
    response_model=None,
    responses={**ERROR_RESPONSES, 200: {"model": DetokenizeResponse}},
)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Return the text of token ids."""
    context = Context.of(request)
    with context.service.registry.resolve(body.model, context.caller) as lease:
        model = lease.model
        tokenizer = require_tokenizer(model, "tokens")
        vocab_size = max(tokenizer.vocab_size, model.llm.engine.limits.vocab_size)
        for place, token in enumerate(body.tokens):
            if token >= vocab_size:
                raise InvalidRequest(f"token {token} is not in the vocabulary of {vocab_size}", param=f"tokens.{place}")
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, bool(body.skip_special_tokens))
        return as_json(DetokenizeResponse(prompt=text))


def _encode(model: ServedModel, body: TokenizeRequest) -> list[int]:
    tokenizer = require_tokenizer(model, "prompt")
    if body.messages is None:
        return tokenizer.encode(body.prompt or "", body.add_special_tokens is not False)
    source = model.chat_template.source(body.tools)
    chat = Chat(
        messages=template_messages(body.messages, source),
        tools=template_tools(body.tools) if body.tools else None,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        variables=template_variables(body.chat_template_kwargs),
    )
    return tokenizer.encode(render_chat(model.llm, chat), bool(body.add_special_tokens))

"""LlamaIndex' model for servers with OpenAI's API."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("llama_index.llms.openai_like", reason="needs the package llama-index-llms-openai-like")

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

from tests.runtime.server.clients.conftest import Endpoint

MESSAGES = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Once upon a time")]


def model(endpoint: Endpoint, **options: Any) -> Any:
    given: Any = {"temperature": 0.0, "max_tokens": 12, "context_window": 1024, "max_retries": 0, **options}
    return OpenAILike(model=endpoint.model, api_base=endpoint.api, api_key=endpoint.key, **given)


def test_complete(endpoint: Endpoint) -> None:
    llm = model(endpoint, is_chat_model=False)
    whole = llm.complete("Once upon a time")
    assert whole.text
    streamed = list(llm.stream_complete("Once upon a time"))
    assert streamed[-1].text == whole.text == "".join(piece.delta or "" for piece in streamed)


def test_chat(endpoint: Endpoint) -> None:
    llm = model(endpoint, is_chat_model=True)
    whole = llm.chat(MESSAGES)
    assert whole.message.role == "assistant" and whole.message.content
    streamed = list(llm.stream_chat(MESSAGES))
    assert streamed[-1].message.content == whole.message.content
    assert "".join(piece.delta or "" for piece in streamed) == whole.message.content
    # A chat model completes through a chat.
    assert llm.complete("Once upon a time").text


def test_the_asynchronous_interface(endpoint: Endpoint) -> None:
    llm = model(endpoint, is_chat_model=True)

    async def run() -> tuple[str, str]:
        whole = await llm.achat(MESSAGES)
        pieces = [piece.delta or "" async for piece in await llm.astream_chat(MESSAGES)]
        return whole.message.content, "".join(pieces)

    whole, streamed = asyncio.run(run())
    assert whole == streamed != ""

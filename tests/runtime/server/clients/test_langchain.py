"""LangChain's chat model for OpenAI's API, pointed at this server."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

pytest.importorskip("langchain_openai", reason="needs the package langchain-openai")

import langchain_openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool

from tests.runtime.server.clients.conftest import Endpoint

MESSAGES = [SystemMessage("Be brief."), HumanMessage("Once upon a time")]


class Place(BaseModel):
    """Somewhere to go."""

    city: Literal["Paris", "Oslo"] = Field(description="Where to.")
    nights: Literal[1, 2, 3]


@tool
def weather(city: Literal["Paris", "Oslo"]) -> str:
    """Tell the weather of a city."""
    return f"rain in {city}"


@pytest.fixture
def chat(endpoint: Endpoint) -> Any:
    return langchain_openai.ChatOpenAI(
        model=endpoint.model, base_url=endpoint.api, api_key=endpoint.key, temperature=0, max_tokens=300, max_retries=0
    )


def test_invoke_and_stream(chat: Any) -> None:
    brief = chat.bind(max_tokens=12)
    whole = brief.invoke(MESSAGES)
    assert isinstance(whole, AIMessage) and whole.content
    assert whole.usage_metadata["output_tokens"] == 12
    assert whole.response_metadata["finish_reason"] == "length"
    assert "".join(chunk.content for chunk in brief.stream(MESSAGES)) == whole.content


def test_batches_and_the_asynchronous_interface(chat: Any) -> None:
    brief = chat.bind(max_tokens=8)

    async def run() -> tuple[Any, str]:
        streamed = "".join([chunk.content async for chunk in brief.astream(MESSAGES)])
        return await brief.ainvoke(MESSAGES), streamed

    answer, streamed = asyncio.run(run())
    assert streamed == answer.content
    assert [each.content for each in brief.batch([MESSAGES] * 3)] == [answer.content] * 3


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat: Any, method: str) -> None:
    # Greedy choices of a model with random weights might write white space until there is no room left.
    found = chat.with_structured_output(Place, method=method).invoke(MESSAGES)
    assert isinstance(found, Place) and found.city in ("Paris", "Oslo")


def test_tools(chat: Any) -> None:
    asked = chat.bind_tools([weather], tool_choice="required", parallel_tool_calls=False)
    answer = asked.invoke(MESSAGES)
    [call] = answer.tool_calls
    assert call["name"] == "weather"
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage) and result.content.startswith("rain in ")
    told = chat.bind(max_tokens=8).invoke([*MESSAGES, answer, result])
    assert told.usage_metadata["output_tokens"] == 8
    gathered = None
    for chunk in asked.stream(MESSAGES):
        gathered = chunk if gathered is None else gathered + chunk
    assert gathered.tool_calls[0]["args"] == call["args"]


def test_embeddings(endpoint: Endpoint) -> None:
    # Without a tokenizer of OpenAI's for this model, texts are sent as they are.
    embeddings = langchain_openai.OpenAIEmbeddings(
        model=endpoint.model, base_url=endpoint.api, api_key=endpoint.key, check_embedding_ctx_length=False
    )
    first, second = embeddings.embed_documents(["Once upon a time", "Water boils"])
    assert embeddings.embed_query("Once upon a time") == pytest.approx(first, abs=1e-5)
    assert first != second

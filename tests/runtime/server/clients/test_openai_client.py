"""The official `openai` client: completions, chats, streams, tools, structured answers, embeddings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import numpy as np
import pytest
from pydantic import BaseModel

pytest.importorskip("openai", reason="needs the package openai")

import openai

from tests.runtime.server.clients.conftest import Endpoint

MESSAGES: Any = [{"role": "user", "content": "Once upon a time"}]
GREEDY: Any = {"temperature": 0, "max_tokens": 12}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


class Step(BaseModel):
    explanation: Literal["halve it", "double it"]
    value: Literal[1, 2, 3]


class Solution(BaseModel):
    steps: tuple[Step, Step]
    right: bool


@pytest.fixture
def client(endpoint: Endpoint) -> Iterator[Any]:
    with openai.OpenAI(base_url=endpoint.api, api_key=endpoint.key, max_retries=0) as made:
        yield made


def test_models(client: Any, endpoint: Endpoint) -> None:
    listed = client.models.list().data
    assert endpoint.model in [model.id for model in listed]
    assert client.models.retrieve(endpoint.model).object == "model"


def test_completions(client: Any, endpoint: Endpoint) -> None:
    asked = {"model": endpoint.model, "prompt": ["Once upon", "Water boils"], "n": 2, "seed": 7, "max_tokens": 12}
    answer = client.completions.create(**asked, logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    for choice in answer.choices:
        assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.tokens) <= 12
        assert all(0 <= offset <= len(choice.text) for offset in choice.logprobs.text_offset)
    texts = {choice.index: "" for choice in answer.choices}
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {choice.index: choice.text for choice in answer.choices}


def test_chat(client: Any, endpoint: Endpoint) -> None:
    answer = client.chat.completions.create(
        model=endpoint.model, messages=MESSAGES, logprobs=True, top_logprobs=2, extra_body={"top_k": 1}, **GREEDY
    )
    [choice] = answer.choices
    assert answer.id and answer.model == endpoint.model
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason == "length" and answer.usage.completion_tokens == 12
    assert len(choice.logprobs.content) == 12
    assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


def test_a_streamed_chat_is_the_whole_one(client: Any, endpoint: Endpoint) -> None:
    asked = {"model": endpoint.model, "messages": MESSAGES, **GREEDY}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    with client.chat.completions.stream(**asked) as stream:
        content = [event.delta for event in stream if event.type == "content.delta"]
        assert "".join(content) == text == stream.current_completion_snapshot.choices[0].message.content


def test_the_asynchronous_client(endpoint: Endpoint) -> None:
    async def one(client: Any, number: int) -> tuple[str, str]:
        asked = {
            "model": endpoint.model,
            "messages": [{"role": "user", "content": f"Tell me about the number {number}"}],
            **GREEDY,
        }
        pieces = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
        whole = await client.chat.completions.create(**asked)
        streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        return streamed, whole.choices[0].message.content

    async def run() -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(base_url=endpoint.api, api_key=endpoint.key, max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(12)))

    for streamed, whole in asyncio.run(run()):
        assert streamed == whole != ""


def test_a_stream_that_is_left_ends_its_request(client: Any, endpoint: Endpoint) -> None:
    stream = client.chat.completions.create(
        model=endpoint.model, messages=MESSAGES, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    assert client.chat.completions.create(model=endpoint.model, messages=MESSAGES, **GREEDY).choices


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_tools(client: Any, endpoint: Endpoint, choice: Any) -> None:
    asked = {"model": endpoint.model, "messages": MESSAGES, "tools": [WEATHER], "tool_choice": choice}
    asked |= {"max_tokens": 400, "temperature": 0, "parallel_tool_calls": False}
    answer = client.chat.completions.create(**asked).choices[0]
    [call] = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    assert call.function.name == "weather" and call.id
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])

    arguments, name = "", None
    for chunk in client.chat.completions.create(**asked, stream=True):
        for part in chunk.choices[0].delta.tool_calls or []:
            name = part.function.name or name
            arguments += part.function.arguments or ""
    assert (name, json.loads(arguments)) == ("weather", json.loads(call.function.arguments))

    again = [*MESSAGES, answer.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    told = client.chat.completions.create(model=endpoint.model, messages=again, tools=[WEATHER], **GREEDY)
    assert told.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_structured_answers(client: Any, endpoint: Endpoint) -> None:
    schema = WEATHER["function"]["parameters"]
    answer = client.chat.completions.create(
        model=endpoint.model,
        messages=MESSAGES,
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema, "strict": True}},
    )
    jsonschema.validate(json.loads(answer.choices[0].message.content), schema)


def test_answers_parsed_into_a_pydantic_model(client: Any, endpoint: Endpoint) -> None:
    asked = {"model": endpoint.model, "messages": MESSAGES, "max_tokens": 400, "response_format": Solution}
    parsed = client.chat.completions.parse(**asked).choices[0].message.parsed
    assert isinstance(parsed, Solution) and len(parsed.steps) == 2
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Solution)


def test_embeddings(client: Any, endpoint: Endpoint) -> None:
    texts = ["Once upon a time", "Water boils", "Once upon a time"]
    # The client asks for base64 unless told otherwise.
    vectors = [item.embedding for item in client.embeddings.create(model=endpoint.model, input=texts).data]
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([1.0] * 3, abs=1e-5)
    assert vectors[0] == pytest.approx(vectors[2], abs=1e-5)
    assert float(np.dot(vectors[0], vectors[1])) < 0.9999
    plain = client.embeddings.create(model=endpoint.model, input=texts[0], encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(vectors[0], abs=1e-5)
    assert plain.usage.prompt_tokens == plain.usage.total_tokens > 0

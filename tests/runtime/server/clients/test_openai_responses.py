"""The responses of the official `openai` client: whole, streamed, with tools, structured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

pytest.importorskip("openai", reason="needs the package openai")

import openai

from tests.runtime.server.clients.conftest import Endpoint
from tests.runtime.server.clients.test_openai_client import WEATHER, Solution

GREEDY: Any = {"temperature": 0, "max_output_tokens": 12}


@pytest.fixture
def client(endpoint: Endpoint) -> Iterator[Any]:
    with openai.OpenAI(base_url=endpoint.api, api_key=endpoint.key, max_retries=0) as made:
        yield made


def test_whole_and_streamed(client: Any, endpoint: Endpoint) -> None:
    asked = {"model": endpoint.model, "input": "Once upon a time", "instructions": "Be brief.", **GREEDY}
    whole = client.responses.create(**asked)
    assert whole.output_text and whole.status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage.output_tokens == 12

    events = list(client.responses.create(**asked, stream=True))
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text

    with client.responses.stream(**asked) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(pieces) == text


def test_a_conversation(client: Any, endpoint: Endpoint) -> None:
    items: Any = [
        {"role": "user", "content": "Once upon a time"},
        {"role": "assistant", "content": "there was a girl"},
        {"role": "user", "content": [{"type": "input_text", "text": "And then?"}]},
    ]
    answer = client.responses.create(model=endpoint.model, input=items, **GREEDY)
    again = client.responses.create(model=endpoint.model, input=[*items, *answer.output], **GREEDY)
    assert again.usage.input_tokens > answer.usage.input_tokens


def test_tools(client: Any, endpoint: Endpoint) -> None:
    function = WEATHER["function"]
    tools: Any = [{"type": "function", **function, "strict": True}]
    asked = {"model": endpoint.model, "input": "Rain?", "tools": tools, "tool_choice": "required", "temperature": 0}
    asked |= {"max_output_tokens": 400, "parallel_tool_calls": False}
    [call] = client.responses.create(**asked).output
    assert call.type == "function_call" and call.name == "weather"
    jsonschema.validate(json.loads(call.arguments), function["parameters"])
    events = list(client.responses.create(**asked, stream=True))
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments

    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    told = client.responses.create(
        model=endpoint.model, input=[{"role": "user", "content": "Rain?"}, call, result], **GREEDY
    )
    assert told.usage.output_tokens > 0


def test_answers_parsed_into_a_pydantic_model(client: Any, endpoint: Endpoint) -> None:
    answer = client.responses.parse(model=endpoint.model, input="Solve it", text_format=Solution, max_output_tokens=400)
    assert isinstance(answer.output_parsed, Solution)

"""Chat and ChatStream: content, reasoning and calls told apart, whole and streamed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from inferencex.runtime import LLM, SamplingParams
from inferencex.runtime.server.grpc.v1 import inference_pb2 as pb
from tests.runtime.server.grpc.calling import Scene, call, chat
from tests.runtime.server.serving import speak

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if tools %}{{ tools[0].function.name }}<tool_call>{% endif %}<think></think><|assistant|>"
)
TOOL = json.dumps({"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}})
CALLED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ANSWER = f"<think>\nlet me see\n</think>\n\nI look. {CALLED}"


@pytest.fixture
def talker(text_bundle: Path, hash_backend: Any, tmp_path: Path) -> LLM:
    """A model that thinks, says something, and calls a function."""
    folder = tmp_path / "bundle"
    shutil.copytree(text_bundle, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return speak(LLM(folder, backend=hash_backend), hash_backend, ANSWER)


def test_a_chat_is_the_engine_s_answer(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8)
    [expected] = llm.chat([{"role": "user", "content": "hello"}], params)

    async def scenario(scene: Scene) -> None:
        answer = await scene.stub.Chat(chat())
        [choice] = answer.choices
        assert choice.message.role == "assistant"
        assert choice.message.content == expected.outputs[0].text
        events = [event async for event in scene.stub.ChatStream(chat())]
        assert events[0].started.prompt_tokens == len(expected.prompt_token_ids)
        assert "".join(event.delta.content for event in events) == expected.outputs[0].text
        assert events[-2].delta.finish_reason == choice.finish_reason
        assert events[-1].finished.usage.completion_tokens == answer.usage.completion_tokens

    call(llm, scenario)


def test_reasoning_and_calls(talker: LLM) -> None:
    async def scenario(scene: Scene) -> None:
        request = chat(tools=[TOOL], max_tokens=160)
        [choice] = (await scene.stub.Chat(request)).choices
        assert choice.finish_reason == pb.FINISH_REASON_TOOL_CALLS
        assert choice.message.reasoning_content == "let me see"
        assert choice.message.content == "I look."
        [made] = choice.message.tool_calls
        assert made.name == "weather" and json.loads(made.arguments) == {"city": "Köln"} and made.id
        events = [event async for event in scene.stub.ChatStream(request)]
        deltas = [event.delta for event in events[1:-1]]
        assert "".join(delta.content for delta in deltas) == "I look."
        assert "".join(delta.reasoning_content for delta in deltas) == "let me see"
        pieces = [piece for delta in deltas for piece in delta.tool_calls]
        assert [piece.name for piece in pieces if piece.name] == ["weather"] and pieces[0].id
        assert json.loads("".join(piece.arguments for piece in pieces)) == {"city": "Köln"}
        assert deltas[-1].finish_reason == pb.FINISH_REASON_TOOL_CALLS

    call(talker, scenario)


def test_without_tools_calls_are_content(talker: LLM) -> None:
    async def scenario(scene: Scene) -> None:
        [choice] = (await scene.stub.Chat(chat(max_tokens=160))).choices
        assert choice.finish_reason == pb.FINISH_REASON_STOP
        assert choice.message.content.startswith("I look. <tool_call>") and not choice.message.tool_calls

    call(talker, scenario)


def test_a_call_that_is_broken_off_is_taken_back(text_bundle: Path, hash_backend: Any, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(text_bundle, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    broken = '<tool_call>{"name": "weather", "arguments": {"city": '
    llm = speak(LLM(folder, backend=hash_backend), hash_backend, broken)

    async def scenario(scene: Scene) -> None:
        events = [event async for event in scene.stub.ChatStream(chat(tools=[TOOL], max_tokens=160))]
        deltas = [event.delta for event in events[1:-1]]
        pieces = [piece for delta in deltas for piece in delta.tool_calls]
        assert pieces[0].name == "weather" and pieces[-1].broken
        assert "".join(delta.content for delta in deltas) == broken
        assert deltas[-1].finish_reason == pb.FINISH_REASON_STOP

    call(llm, scenario)

"""Messages of OpenAI's API in the templates of real models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inferencex.runtime.server.errors import InvalidRequest
from inferencex.runtime.server.openai.messages import template_messages, template_tools, template_variables
from inferencex.runtime.server.openai.protocol.chat import Message, Tool
from inferencex.runtime.server.tools.choose import takes_tools
from inferencex.runtime.text.chat import ChatTemplate

TOOL = Tool.model_validate({"type": "function", "function": {"name": "get_weather", "strict": True}})
ARGUMENTS = {"city": "Zürich", "days": [1, 2]}


def conversation(arguments: Any, **answer: Any) -> list[Message]:
    function = {"name": "get_weather", "arguments": arguments}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    return [
        Message.model_validate(message)
        for message in (
            {"role": "user", "content": [{"type": "text", "text": "Weather"}, {"type": "text", "text": "please?"}]},
            {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call], **answer},
            {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": "21 °C"},
        )
    ]


@pytest.mark.parametrize("given", [json.dumps(ARGUMENTS), ARGUMENTS])
def test_arguments_are_objects_for_templates(given: Any) -> None:
    user, assistant, result = template_messages(conversation(given), "")
    assert user == {"role": "user", "content": "Weather\nplease?"}
    assert assistant["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    assert assistant["content"] == "" and "refusal" not in assistant
    assert result["content"] == "21 °C"


@pytest.mark.parametrize(("given", "expected"), [("", {}), (None, {}), ("{oops", "{oops"), ("[1]", "[1]")])
def test_arguments_that_are_no_object(given: Any, expected: Any) -> None:
    [_, assistant, _] = template_messages(conversation(given), "")
    assert assistant["tool_calls"][0]["function"]["arguments"] == expected


def test_tool_rounds_render_in_every_template_that_knows_tools(shared_data: Path) -> None:
    rendered = []
    for path in sorted((shared_data / "chat-templates").glob("*.jinja")):
        source = path.read_text("utf-8")
        if not takes_tools(source):
            continue
        templates = ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})
        text = templates.render(
            template_messages(conversation(json.dumps(ARGUMENTS)), source), tools=template_tools([TOOL])
        )
        assert "get_weather" in text and "21 °C" in text, path.stem
        # As JSON, and not as JSON inside a text.
        assert '\\"city' not in text, path.stem
        rendered.append(path.stem)
    assert len(rendered) >= 6


def test_a_developer_is_the_system_where_templates_know_none() -> None:
    messages = [Message(role="developer", content="Be brief.")]
    assert template_messages(messages, "{{ system }}")[0]["role"] == "system"
    assert template_messages(messages, "{% if role == 'developer' %}")[0]["role"] == "developer"


def test_an_empty_list_of_calls_is_none() -> None:
    [message] = template_messages([Message(role="assistant", content="Hi", tool_calls=[])], "")
    assert message == {"role": "assistant", "content": "Hi"}


def test_what_is_no_text_is_refused() -> None:
    message = Message.model_validate({"role": "user", "content": [{"type": "text"}]})
    with pytest.raises(InvalidRequest) as refused:
        template_messages([message], "")
    assert refused.value.param == "messages.0.content.0.text"
    with pytest.raises(InvalidRequest, match="field of its own"):
        template_variables({"tools": []})
    assert template_variables({"enable_thinking": False}) == {"enable_thinking": False}

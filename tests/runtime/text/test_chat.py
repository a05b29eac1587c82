from __future__ import annotations

import json
from pathlib import Path, PosixPath
from typing import Any

import pytest

from inferencex.formats.errors import BundleError, RequestError
from inferencex.runtime.text import ChatTemplate, Tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather at a place, in °C & <b>words</b>",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name of the city", "enum": ["Zürich", "東京"]},
                "days": {"type": "integer", "default": 1},
            },
            "required": ["city"],
        },
        "return": {"type": "string"},
    },
}
SYSTEM = {"role": "system", "content": "You are terse.\nAnswer in one line."}
USER = {"role": "user", "content": "  What's the weather in Zürich? <|im_end|> {{ 7*7 }} 😀\n"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "abc123def", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
    ],
}
TEXT_CALL = {
    **CALL,
    "content": None,
    "tool_calls": [{"id": "abc123def", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "abc123def", "name": "get_weather", "content": '{"t": 21}'}
THOUGHT = {"role": "assistant", "content": "Fine.", "reasoning": "Let me think.", "thinking": None}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n21 °C."}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER],
    "system": [SYSTEM, USER],
    "many turns": [SYSTEM, USER, ANSWER, {"role": "user", "content": "And tomorrow?"}],
    "tool call": [USER, CALL],
    "tool result": [USER, CALL, RESULT],
    "tool round": [SYSTEM, USER, CALL, RESULT, ANSWER, {"role": "user", "content": "Thanks"}],
    "text arguments": [USER, TEXT_CALL, RESULT],
    "two results": [USER, CALL, RESULT, RESULT],
    "reasoning": [USER, THOUGHT, {"role": "user", "content": "Sure?"}],
    "ends with the assistant": [USER, ANSWER],
    "assistant first": [ANSWER, USER],
    "two users": [USER, USER],
    "content parts": [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]}],
    "unknown role": [{"role": "narrator", "content": "Once"}],
    "no content": [{"role": "user"}],
    "developer": [{"role": "developer", "content": "Be kind."}, USER],
    "number as content": [{"role": "user", "content": 42}],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"add_generation_prompt": True},
    "no generation prompt": {"add_generation_prompt": False},
    "tools": {"add_generation_prompt": True, "tools": [WEATHER, WEATHER]},
    "no tools": {"add_generation_prompt": True, "tools": []},
    "documents": {"add_generation_prompt": True, "documents": [{"title": "T", "text": "Körper"}]},
    "variables": {"add_generation_prompt": True, "enable_thinking": False, "thinking": True, "bos_token": "<B>"},
}


@pytest.fixture(scope="module")
def special(tokenizer_folders: dict[str, Path]) -> Tokenizer:
    return Tokenizer.load(tokenizer_folders["added-tokens"])


@pytest.fixture(scope="module")
def theirs(tokenizer_folders: dict[str, Path]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folders["added-tokens"], local_files_only=True)


def make(folder: Path, tokenizer: Tokenizer, template: object) -> ChatTemplate:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}), encoding="utf-8")
    return ChatTemplate.load(folder, tokenizer)


def outcome(render: Any, *args: Any, **options: Any) -> str | None:
    """The text, or None for a template that refuses."""
    import jinja2

    try:
        return str(render(*args, **options))
    except (RequestError, jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError):
        return None


@pytest.mark.shared
@pytest.mark.parametrize(
    "name",
    [
        "GLM-4.6",
        "HuggingFaceTB-SmolLM3-3B",
        "LFM2-8B-A1B",
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
        "Qwen-Qwen2.5-7B-Instruct",
        "Qwen-Qwen3-0.6B",
        "deepseek-ai-DeepSeek-V3.1",
        "google-gemma-2-2b-it",
        "ibm-granite-granite-3.3-2B-Instruct",
        "meta-llama-Llama-3.1-8B-Instruct",
        "meta-llama-Llama-3.2-3B-Instruct",
        "microsoft-Phi-3.5-mini-instruct",
        "mistralai-Mistral-Nemo-Instruct-2407",
        "openai-gpt-oss-120b",
    ],
)
def test_renders_as_transformers_does(shared_data: Path, special: Tokenizer, theirs: Any, name: str) -> None:
    source = (shared_data / "chat-templates" / f"{name}.jinja").read_text(encoding="utf-8")
    ours = ChatTemplate({"default": source}, special.special_tokens)
    rendered = 0
    for conversation, messages in CONVERSATIONS.items():
        for option, options in OPTIONS.items():
            found = outcome(ours.render, messages, **options)
            expected = outcome(theirs.apply_chat_template, messages, chat_template=source, tokenize=False, **options)
            assert found == expected, (conversation, option)
            rendered += found is not None
    assert rendered >= len(OPTIONS)


@pytest.mark.shared
def test_no_template_of_the_shared_folder_is_left_out(shared_data: Path) -> None:
    marks = [mark for mark in test_renders_as_transformers_does.pytestmark if mark.name == "parametrize"]
    assert sorted(path.stem for path in (shared_data / "chat-templates").glob("*.jinja")) == sorted(marks[0].args[1])


def test_features_of_the_template_language(special: Tokenizer, theirs: Any) -> None:
    source = """
        {%- set ns = namespace(n=0, self=1) %}
        {% for message in messages %}
            {%- if loop.index > 2 %}{% break %}{% endif %}
            {%- set ns.n = ns.n + 1 %}
            {% generation %}{{ message | tojson }}{{ message.items() | list | tojson(indent=2) }}{% endgeneration %}
        {% endfor %}
        {{ ns.n }} {{ ns.self }} {{ dict(a=1) }} {{ dict.fromkeys('ab', 0) }} {{ bos_token }} {{ eos_token }}
        {{ image_token }} {{ strftime_now('%Y') }} {{ tools is none }} {{ documents is none }} {{ x | default('-') }}
    """
    messages = [{"role": "user", "content": "<é> & 'quote'"}] * 3
    ours = ChatTemplate({"default": source}, special.special_tokens)
    expected = theirs.apply_chat_template(messages, chat_template=source, tokenize=False, add_generation_prompt=True)
    assert ours.render(messages) == expected


def test_the_caller_s_messages_stay_as_they_are(special: Tokenizer) -> None:
    messages = [{"role": "user", "content": ["a"], "reasoning": "r", "name": None}]
    before = json.dumps(messages)
    ours = ChatTemplate({"default": "{{ messages[0].reasoning_content }}{{ 'name' in messages[0] }}"}, {})
    assert ours.render(messages) == "rFalse"
    assert json.dumps(messages) == before


def test_named_templates(tmp_path: Path, special: Tokenizer) -> None:
    entries = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    for value in (entries, {entry["name"]: entry["template"] for entry in entries}):
        template = make(tmp_path, special, value)
        assert template.names == ["default", "tool_use"]
        assert template.render([USER]) == "D"
        assert template.render([USER], tools=[WEATHER]) == "T"
        assert template.render([USER], template="tool_use") == "T"
        with pytest.raises(RequestError, match="no chat template 'rag'; this model has default, tool_use"):
            template.render([USER], template="rag")
    template = make(tmp_path, special, [{"name": "rag", "template": "R"}])
    with pytest.raises(RequestError, match="no chat template 'default'"):
        template.render([USER])


def test_files_take_the_place_of_the_configuration(tmp_path: Path, special: Tokenizer) -> None:
    make(tmp_path, special, "configured")
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file for tools")
    template = ChatTemplate.load(tmp_path, special)
    assert template.render([USER]) == "file"
    assert template.render([USER], tools=[WEATHER]) == "file for tools"


def test_a_bundle_without_template_says_so_when_asked_to_chat(tmp_path: Path, special: Tokenizer) -> None:
    template = ChatTemplate.load(tmp_path, special)
    assert not template
    with pytest.raises(RequestError, match="no chat template"):
        template.render([USER])


def test_bad_messages_are_refused(special: Tokenizer) -> None:
    template = ChatTemplate({"default": "{{ messages }}"}, {})
    with pytest.raises(RequestError, match="messages is empty"):
        template.render([])
    with pytest.raises(RequestError, match=r"messages\[1\] is a str"):
        template.render([USER, "text"])  # type: ignore[list-item]
    with pytest.raises(RequestError, match=r"tools\[0\] is a str"):
        template.render([USER], tools=["f"])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="found a PosixPath"):
        template.render([{"role": "user", "content": PosixPath(".")}])


def test_bad_configuration_is_named(tmp_path: Path, special: Tokenizer) -> None:
    for value in (3, ["x"], [{"name": "default"}], {"default": 1}):
        with pytest.raises(BundleError, match=r"tokenizer_config\.json: chat_template"):
            make(tmp_path, special, value)


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ raise_exception('no\nsystem role') }}",
        "{{ messages[0].content.missing.deeper }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ dict.__call__.__globals__ }}",
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ (messages | attr('__class__')).__name__ }}",
        "{{ '{0.__class__}'.format(messages).x.y }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ lipsum.__globals__ ['os'] }}",
        "{% for i in range(100000000) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_failing_and_escaping_templates_are_request_errors(source: str) -> None:
    template = ChatTemplate({"default": source}, {})
    with pytest.raises(RequestError, match="chat template 'default' cannot render") as caught:
        template.render([USER])
    assert "\n" not in str(caught.value)


def test_the_template_that_is_taken_by_default_can_be_looked_at() -> None:
    templates = ChatTemplate({"default": "plain", "tool_use": "with tools"}, {})
    assert (templates.source(), templates.source([]), templates.source([WEATHER])) == (
        "plain",
        "with tools",
        "with tools",
    )
    assert ChatTemplate({"default": "plain"}, {}).source([WEATHER]) == "plain"
    assert ChatTemplate({}, {}).source() == ""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencex.runtime.server.tools import CallArguments, CallStart, ToolParser, parser_class
from inferencex.runtime.server.tools.choose import takes_tools
from inferencex.runtime.server.tools.forced import ForcedParser
from inferencex.runtime.server.tools.hermes import HermesParser
from inferencex.runtime.server.tools.llama3 import Llama3Parser
from inferencex.runtime.server.tools.mistral import MistralParser
from tests.runtime.server.tools.reading import cut, feed

FUNCTIONS = ("get_weather", "f")
PARSERS: list[type[ToolParser]] = [HermesParser, Llama3Parser, MistralParser, ForcedParser]
ZURICH = '{"city": "Zürich", "days": [1, 2.5e3, -0], "deep": {"a": {"b": null}}}'


def weather(key: str = "arguments") -> str:
    return f'{{"name": "get_weather", "{key}": {ZURICH}}}'


WELL_FORMED: list[tuple[type[ToolParser], str, str, list[tuple[str, str]]]] = [
    (HermesParser, f"<tool_call>\n{weather()}\n</tool_call>", "", [("get_weather", ZURICH)]),
    (HermesParser, f"Let me see.\n\n<tool_call>{weather()}</tool_call>\n", "Let me see.", [("get_weather", ZURICH)]),
    (
        HermesParser,
        f'<tool_call>\n{weather()}\n</tool_call>\n<tool_call>\n{{"arguments": {{}}, "name": "f"}}\n</tool_call>',
        "",
        [("get_weather", ZURICH), ("f", "{}")],
    ),
    (HermesParser, f"<tool_call>{weather()}", "", [("get_weather", ZURICH)]),
    (HermesParser, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    (HermesParser, f"a <tool_call>{weather()}</tool_call> b", "a b", [("get_weather", ZURICH)]),
    (HermesParser, "no calls < here <tool \n", "no calls < here <tool \n", []),
    (Llama3Parser, weather("parameters"), "", [("get_weather", ZURICH)]),
    (Llama3Parser, f"\n{weather('parameters')}\n", "", [("get_weather", ZURICH)]),
    (Llama3Parser, f"<|python_tag|>{weather('parameters')}", "", [("get_weather", ZURICH)]),
    (Llama3Parser, f"Sure. <|python_tag|>{weather()}", "Sure.", [("get_weather", ZURICH)]),
    (
        Llama3Parser,
        f'{weather("parameters")}; {{"name": "f", "parameters": {{}}}}',
        "",
        [("get_weather", ZURICH), ("f", "{}")],
    ),
    (MistralParser, f"[TOOL_CALLS][{weather()}]", "", [("get_weather", ZURICH)]),
    (
        MistralParser,
        f'[TOOL_CALLS] [{weather()}, {{"name": "f", "arguments": {{}}, "id": "abcdefghi"}}]',
        "",
        [("get_weather", ZURICH), ("f", "{}")],
    ),
    (MistralParser, f"Well. [TOOL_CALLS]get_weather[ARGS]{ZURICH}", "Well.", [("get_weather", ZURICH)]),
    (
        MistralParser,
        f"[TOOL_CALLS]get_weather{ZURICH}[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{{}}",
        "",
        [("get_weather", ZURICH), ("f", "{}")],
    ),
    (ForcedParser, f"[{weather()}]", "", [("get_weather", ZURICH)]),
    (ForcedParser, f'[{weather()},\n{{"name":"f","arguments":{{}}}}]', "", [("get_weather", ZURICH), ("f", "{}")]),
    (ForcedParser, '{"answer": 42}', '{"answer": 42}', []),
]

MALFORMED: list[tuple[type[ToolParser], str]] = [
    (HermesParser, "<tool_call>not JSON</tool_call>"),
    (HermesParser, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>'),
    (HermesParser, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "f", "arguments": "text"}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "f", "name": "f"}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {}, "parameters": {}}</tool_call>'),
    (HermesParser, '<tool_call>{"arguments": {}}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "f"} and more</tool_call>'),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": "cut sho'),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {}}</tool_ca'),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": "\\x"}}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 70 + "1" + "}" * 71 + "</tool_call>"),
    (HermesParser, "  <tool_call>  "),
    (Llama3Parser, '{"name": "Ada", "born": 1815}'),
    (Llama3Parser, '{"answer": 42}'),
    (Llama3Parser, "<|python_tag|>brave_search.call(query='x')"),
    (Llama3Parser, 'It is {"name": "f", "parameters": {}}'),
    (MistralParser, "[TOOL_CALLS]"),
    (MistralParser, "[TOOL_CALLS] and then nothing"),
    (MistralParser, '[TOOL_CALLS][{"name": "g"}]'),
    (MistralParser, '[TOOL_CALLS]f[ARGS]{"a"}'),
    (MistralParser, "[TOOL_CALLS]g[ARGS]{}"),
    (MistralParser, "[TOOL_CALLS]" + "f" * 600 + "{}"),
    (ForcedParser, '[{"name": "f", "arguments": {"a": [1, 2'),
]


@pytest.mark.parametrize(("parser", "text", "content", "calls"), WELL_FORMED)
def test_calls_are_found(parser: type[ToolParser], text: str, content: str, calls: list[tuple[str, str]]) -> None:
    read = feed(parser(FUNCTIONS), [text])
    assert (read.content, read.whole, read.broken) == (content, calls, [])


@pytest.mark.parametrize(("parser", "text"), MALFORMED)
def test_what_is_no_call_is_content_to_the_last_character(parser: type[ToolParser], text: str) -> None:
    read = feed(parser(FUNCTIONS), [text])
    assert (read.content, read.whole) == (text, [])


def test_a_call_behind_a_broken_one_is_found() -> None:
    read = feed(HermesParser(FUNCTIONS), ['<tool_call>{"name": "f", "arguments": {"a": <tool_call>{"name": "f"}'])
    assert read.content == '<tool_call>{"name": "f", "arguments": {"a":'
    assert read.whole == [("f", "{}")]
    read = feed(MistralParser(FUNCTIONS), ['[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g"}]'])
    assert (read.content, read.whole) == (', {"name": "g"}]', [("f", "{}")])


@pytest.mark.parametrize("parser", PARSERS)
@given(data=st.data())
def test_however_the_text_is_cut_the_result_is_the_same(parser: type[ToolParser], data: st.DataObject) -> None:
    known = [text for _, text, *_ in WELL_FORMED] + [text for _, text in MALFORMED]
    tokens = [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        "{",
        "}",
        '"',
        ":",
        ",",
        " ",
        "f",
    ]
    tokens += ["]", "[", "\n", "\\", "1", "-", "true", '"name": "f"', '"arguments": {}', "é", ";"]
    texts = st.lists(st.sampled_from(known) | st.sampled_from(tokens), max_size=8).map("".join)
    text = data.draw(texts)
    places = data.draw(st.lists(st.integers(0, max(1, len(text))), max_size=12))
    whole = feed(parser(FUNCTIONS), [text])
    assert feed(parser(FUNCTIONS), cut(text, places)) == whole
    assert feed(parser(FUNCTIONS), text) == whole  # character by character
    for _, arguments in whole.whole:
        assert isinstance(json.loads(arguments), dict)
    if not whole.whole:
        assert whole.content == text


@pytest.mark.parametrize("parser", [HermesParser, Llama3Parser])
def test_arguments_come_in_pieces_as_they_are_written(parser: type[ToolParser]) -> None:
    text = weather() if parser is Llama3Parser else f"<tool_call>{weather()}</tool_call>"
    events = []
    reader = parser(FUNCTIONS)
    for character in text:
        events += reader.push(character)
    assert isinstance(events[0], CallStart) and events[0].name == "get_weather" and re.match("call_", events[0].id)
    pieces = [event.text for event in events if isinstance(event, CallArguments)]
    assert "".join(pieces) == ZURICH and len(pieces) == len(ZURICH)


def test_ids_are_those_that_templates_take_back() -> None:
    [start, *_] = MistralParser(FUNCTIONS).push('[TOOL_CALLS][{"name": "f", "arguments": {}}]')
    assert isinstance(start, CallStart) and re.fullmatch("[A-Za-z0-9]{9}", start.id)


TEMPLATES: dict[str, type[ToolParser] | None] = {
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": HermesParser,
    "Qwen-Qwen2.5-7B-Instruct": HermesParser,
    "Qwen-Qwen3-0.6B": HermesParser,
    "meta-llama-Llama-3.1-8B-Instruct": Llama3Parser,
    "meta-llama-Llama-3.2-3B-Instruct": Llama3Parser,
    "mistralai-Mistral-Nemo-Instruct-2407": MistralParser,
    "GLM-4.6": None,
    "openai-gpt-oss-120b": None,
    "google-gemma-2-2b-it": None,
    "microsoft-Phi-3.5-mini-instruct": None,
}


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_the_template_tells_the_parser(shared_data: Path, name: str) -> None:
    template = (shared_data / "chat-templates" / f"{name}.jinja").read_text(encoding="utf-8")
    assert parser_class(template) is TEMPLATES[name]
    assert takes_tools(template) == (name not in ("google-gemma-2-2b-it", "microsoft-Phi-3.5-mini-instruct"))

"""`/v1/chat/completions`: messages, streams, log-probabilities, tools, reasoning."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.server.openai.serving import MODEL, Serve, Served, serve, with_template

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "the cat?"}]
BODY = {"messages": USER, "max_tokens": 200, "temperature": 0}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather at a place",
            "parameters": {
                "type": "object",
                "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}},
                "required": ["city"],
                "additionalProperties": False,
                "$defs": {"city": {"enum": ["Bern", "Oslo"]}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
CALL = '{"name": "get_weather", "arguments": {"city": "Bern"}}'
HERMES = "Qwen-Qwen2.5-7B-Instruct"
LLAMA = "meta-llama-Llama-3.1-8B-Instruct"
MISTRAL = "mistralai-Mistral-Nemo-Instruct-2407"


def joined(events: list[Any], index: int = 0) -> dict[str, Any]:
    """Put a stream's deltas together as clients do."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": {}, "finish_reason": None}
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            for key in ("content", "reasoning_content"):
                message[key] += delta.get(key) or ""
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    message["tool_calls"][call["index"]] = [call["id"], call["function"]["name"], ""]
                message["tool_calls"][call["index"]][2] += call["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"] or message["finish_reason"]
    return message


def shared_template(shared_data: Path, name: str) -> str:
    return (shared_data / "chat-templates" / f"{name}.jinja").read_text(encoding="utf-8")


def test_an_answer(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        served.say("on the mat")
        answer = await served.post(PATH, {"model": MODEL, **BODY, "user": "u", "metadata": {"a": "b"}, "store": False})
        assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
        [choice] = answer["choices"]
        message = choice["message"]
        assert message == {"role": "assistant", "content": "on the mat", "refusal": None}
        assert (choice["finish_reason"], choice["index"], choice["logprobs"]) == ("stop", 0, None)
        prompt = served.llm.require_tokenizer().encode("<|user|>the cat?<|assistant|>", False)
        assert answer["usage"]["prompt_tokens"] == len(prompt)

    served(scenario)


def test_without_a_limit_the_answer_may_fill_the_context(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        answer = await served.post(PATH, {"messages": USER, "max_tokens": None, "max_completion_tokens": None})
        assert answer["choices"][0]["finish_reason"] in ("stop", "length")
        assert answer["usage"]["total_tokens"] <= 200
        short = await served.post(PATH, {"messages": USER, "max_completion_tokens": 3})
        assert short["usage"]["completion_tokens"] == 3

    served(scenario, max_model_len=200)


def test_null_is_the_default_of_every_field(served: Serve) -> None:
    from inferencex.runtime.server.openai.protocol.chat import ChatRequest

    async def scenario(served: Served) -> None:
        nothing = {name: None for name in ChatRequest.model_fields if name != "messages"}
        answer = await served.post(PATH, {"messages": USER, **nothing})
        assert answer["choices"] == (await served.post(PATH, {"messages": USER}))["choices"]

    served(scenario, max_model_len=64)


def test_a_stream_byte_for_byte(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        served.say("cat\n")
        answer = await served.client.post(PATH, json={**BODY, "stream": True}, headers={"X-Request-Id": "abc"})
        frames = answer.content.split(b"\n\n")
        created = frames[0].split(b'"created":')[1].split(b",")[0].decode()
        head = f'data: {{"id":"chatcmpl-abc","object":"chat.completion.chunk","created":{created},"model":"{MODEL}",'
        head += '"system_fingerprint":null,"choices":[{"index":0,"delta":'
        none = ',"logprobs":null,"finish_reason":null}]}'
        assert [frame.decode().removeprefix(head) for frame in frames] == [
            '{"role":"assistant","content":"","refusal":null}' + none,
            '{"content":"c"}' + none,
            '{"content":"at"}' + none,
            '{"content":"\\n"}' + none,
            '{},"logprobs":null,"finish_reason":"stop","stop_reason":null}]}',
            "data: [DONE]",
            "",
        ]

    served(scenario)


def test_usage_ends_a_stream_that_asks_for_it(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        body = {**BODY, "max_tokens": 5, "stream_options": {"include_usage": True}}
        *events, last = await served.events(PATH, body)
        assert all(event["usage"] is None and event["choices"] for event in events)
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 5
        assert last["id"] == events[0]["id"] and last["created"] == events[0]["created"]
        assert (await served.refused(PATH, body))["param"] == "stream_options"

    served(scenario)


def test_several_streamed_answers(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        body = {"messages": USER, "n": 3, "seed": 5, "temperature": 1.0, "max_tokens": 8}
        whole = await served.post(PATH, body)
        events = await served.events(PATH, body)
        assert sum("role" in event["choices"][0]["delta"] for event in events) == 3
        for choice in whole["choices"]:
            assert joined(events, choice["index"])["content"] == choice["message"]["content"]
        assert len({choice["message"]["content"] for choice in whole["choices"]}) == 3

    served(scenario)


def test_logprobs_have_tokens_and_bytes(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        served.say("the 日 cat")
        body = {**BODY, "logprobs": True, "top_logprobs": 2}
        [choice] = (await served.post(PATH, body))["choices"]
        content = choice["logprobs"]["content"]
        assert bytes(b for entry in content[:-1] for b in entry["bytes"]).decode() == "the 日 cat"
        for entry in content:
            assert next(top["token"] for top in entry["top_logprobs"]) == entry["token"]
            assert len(entry["top_logprobs"]) == 2 and entry["logprob"] == entry["top_logprobs"][0]["logprob"]
        events = await served.events(PATH, body)
        streamed = [event["choices"][0]["logprobs"] for event in events]
        assert [entry for each in streamed if each for entry in each["content"]] == content
        [choice] = (await served.post(PATH, {**BODY, "logprobs": True}))["choices"]
        assert all(entry["top_logprobs"] == [] for entry in choice["logprobs"]["content"])
        assert (await served.refused(PATH, {**BODY, "top_logprobs": 2}))["param"] == "top_logprobs"

    served(scenario)


def test_token_ids_are_returned_on_request(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        body = {**BODY, "max_tokens": 6, "return_token_ids": True}
        whole = await served.post(PATH, body)
        assert len(whole["choices"][0]["token_ids"]) == 6
        assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
        choices = [event["choices"][0] for event in await served.events(PATH, body)]
        assert choices[0]["prompt_token_ids"] == whole["prompt_token_ids"]
        assert [i for choice in choices[1:] for i in choice["token_ids"]] == whole["choices"][0]["token_ids"]

    served(scenario)


def test_messages_of_every_kind(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        parts = [{"type": "text", "text": "the cat"}, {"type": "text", "text": "on"}]
        body = {"messages": [{"role": "user", "content": parts}]}
        tokens = await served.post("/tokenize", body)
        same = await served.post("/tokenize", {"messages": [{"role": "user", "content": "the cat\non"}]})
        assert tokens == same
        image = {"type": "image_url", "image_url": {"url": "data:"}}
        error = await served.refused(PATH, {"messages": [{"role": "user", "content": [image]}]})
        assert error["param"] == "messages.0.content.0" and "only texts" in error["message"]
        error = await served.refused(PATH, {"messages": []})
        assert error["param"] == "messages"

    served(scenario)


def test_going_on_with_the_last_message(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        messages = [*USER, {"role": "assistant", "content": "on the"}]
        body = {"messages": messages, "continue_final_message": True, "return_token_ids": True, "max_tokens": 1}
        answer = await served.post(PATH, body)
        tokenizer = served.llm.require_tokenizer()
        assert answer["prompt_token_ids"] == tokenizer.encode("<|user|>the cat?<|assistant|>on the", False)
        error = await served.refused(PATH, {**body, "add_generation_prompt": True})
        assert error["param"] == "continue_final_message"

    served(scenario)


def test_answers_in_json(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        schema = {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        }
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
        answer = await served.post(PATH, {**BODY, "response_format": wanted})
        assert json.loads(answer["choices"][0]["message"]["content"]) in ({"a": 1}, {"a": 2})
        error = await served.refused(PATH, {**BODY, "response_format": wanted, "guided_regex": "a"})
        assert "response_format and guided_regex" in error["message"]
        error = await served.refused(PATH, {**BODY, "response_format": {"type": "json_schema"}})
        assert error["param"] == "response_format.json_schema.schema"
        assert "(" in (await served.refused(PATH, {**BODY, "guided_regex": "("}))["message"]

    served(scenario)


@pytest.mark.parametrize(
    ("template", "text", "content"),
    [
        (HERMES, f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>", "Let me see."),
        (LLAMA, CALL.replace("arguments", "parameters"), None),
        (MISTRAL, f"[TOOL_CALLS][{CALL}]", None),
        (MISTRAL, '[TOOL_CALLS]get_weather[ARGS]{"city": "Bern"}', None),
    ],
)
def test_tool_calls(
    shared_data: Path, text_bundle: Path, backend: Any, tmp_path: Path, template: str, text: str, content: str | None
) -> None:
    async def scenario(served: Served) -> None:
        served.say(text)
        body = {**BODY, "tools": TOOLS}
        [choice] = (await served.post(PATH, body))["choices"]
        message = choice["message"]
        assert (choice["finish_reason"], message["content"]) == ("tool_calls", content)
        [call] = message["tool_calls"]
        assert call["type"] == "function" and re.fullmatch("call_[0-9a-f]{24}|[A-Za-z0-9]{9}", call["id"])
        assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Bern"}'}
        events = await served.events(PATH, body)
        streamed = joined(events)
        assert streamed["content"] == (content or "") and streamed["finish_reason"] == "tool_calls"
        assert [each[1:] for each in streamed["tool_calls"].values()] == [["get_weather", '{"city": "Bern"}']]
        first = next(e for e in events if "tool_calls" in e["choices"][0]["delta"])["choices"][0]["delta"]["tool_calls"]
        assert first[0]["type"] == "function" and first[0]["function"]["arguments"] == ""

        # The call, and what came of it, go back into the prompt.
        result = {"role": "tool", "tool_call_id": call["id"], "content": "21 °C"}
        served.say("Warm.")
        [choice] = (await served.post(PATH, {**body, "messages": [*USER, message, result]}))["choices"]
        assert choice["message"]["content"] == "Warm." and choice["finish_reason"] == "stop"
        tokens = await served.post("/tokenize", {"messages": [*USER, message, result], "tools": TOOLS})
        prompt = (await served.post("/detokenize", {"tokens": tokens["tokens"]}))["prompt"]
        assert '{"city": "Bern"}' in prompt and "21 °C" in prompt

        # None is an answer with the tools left out of the prompt.
        none = {**body, "tool_choice": "none"}
        assert (await served.post(PATH, none))["usage"]["prompt_tokens"] < tokens["count"]

    bundle = with_template(text_bundle, tmp_path / "bundle", shared_template(shared_data, template))
    serve(bundle, scenario, backend, num_kv_blocks=1024)


def test_what_is_no_call_stays_content(shared_data: Path, text_bundle: Path, backend: Any, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        text = '<tool_call>{"name": "get_weather", "arguments": {"city": oops}}</tool_call>'
        served.say(text)
        [choice] = (await served.post(PATH, {**BODY, "tools": TOOLS}))["choices"]
        assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
        assert choice["finish_reason"] == "stop"
        streamed = joined(await served.events(PATH, {**BODY, "tools": TOOLS}))
        assert (streamed["content"], streamed["finish_reason"]) == (text, "stop")
        served.say(f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>")
        for parallel, count in ((None, 2), (True, 2), (False, 1)):
            body = {**BODY, "tools": TOOLS, "parallel_tool_calls": parallel}
            [choice] = (await served.post(PATH, body))["choices"]
            assert len(choice["message"]["tool_calls"]) == count
            assert len(joined(await served.events(PATH, body))["tool_calls"]) == count

    bundle = with_template(text_bundle, tmp_path / "bundle", shared_template(shared_data, HERMES))
    serve(bundle, scenario, backend, num_kv_blocks=1024)


@pytest.mark.parametrize("template", [HERMES, LLAMA, MISTRAL])
def test_a_call_can_be_demanded(
    shared_data: Path, text_bundle: Path, backend: Any, tmp_path: Path, template: str
) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}

    async def scenario(served: Served) -> None:
        for choice in ("required", named):
            body = {**BODY, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
            [answer] = (await served.post(PATH, body))["choices"]
            [call] = answer["message"]["tool_calls"]
            assert answer["message"]["content"] is None and answer["finish_reason"] == "tool_calls"
            arguments = json.loads(call["function"]["arguments"])
            if choice == named or call["function"]["name"] == "get_weather":
                assert call["function"]["name"] == "get_weather" and arguments["city"] in ("Bern", "Oslo")
            streamed = joined(await served.events(PATH, body))
            assert [each[1:] for each in streamed["tool_calls"].values()] == [list(call["function"].values())]
        # With a form for the answer, it is one or the other.
        schema = {
            "type": "object",
            "properties": {"ok": {"const": True}},
            "required": ["ok"],
            "additionalProperties": False,
        }
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        for text, calls in ((f"[{CALL}]", 1), ('{"ok": true}', 0)):
            served.say(text)
            [answer] = (await served.post(PATH, {**BODY, "tools": TOOLS, "response_format": wanted}))["choices"]
            assert len(answer["message"].get("tool_calls", [])) == calls
            assert answer["message"]["content"] == (None if calls else text)

    bundle = with_template(text_bundle, tmp_path / "bundle", shared_template(shared_data, template))
    serve(bundle, scenario, backend, num_kv_blocks=1024)


def test_tool_choices_that_cannot_be(shared_data: Path, text_bundle: Path, backend: Any, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        unknown = {"type": "function", "function": {"name": "other"}}
        for fields, param in (
            ({"tool_choice": "required"}, "tool_choice"),
            ({"tools": TOOLS, "tool_choice": unknown}, "tool_choice"),
            ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
            ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
            ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
            ({"tools": TOOLS, "guided_regex": "a"}, "tools"),
            ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
            ({"chat_template_kwargs": {"documents": 5}}, "chat_template_kwargs.documents"),
        ):
            assert (await served.refused(PATH, {**BODY, **fields}))["param"] == param, fields

    bundle = with_template(text_bundle, tmp_path / "bundle", shared_template(shared_data, HERMES))
    serve(bundle, scenario, backend, num_kv_blocks=1024)


def test_tools_need_a_template_that_knows_them(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        error = await served.refused(PATH, {**BODY, "tools": TOOLS})
        assert error["param"] == "tools" and "does not know tools" in error["message"]

    served(scenario)


THINKING = "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}{% endfor %}<|assistant|>"


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_is_told_apart(text_bundle: Path, backend: Any, tmp_path: Path, opened: bool) -> None:
    async def scenario(served: Served) -> None:
        served.say(("" if opened else "<think>\n") + "Hm. The mat?\n</think>\n\nOn the mat.")
        [choice] = (await served.post(PATH, BODY))["choices"]
        message = {"role": "assistant", "content": "On the mat.", "refusal": None, "reasoning_content": "Hm. The mat?"}
        assert choice["message"] == message
        streamed = joined(await served.events(PATH, BODY))
        assert (streamed["reasoning_content"], streamed["content"]) == ("Hm. The mat?", "On the mat.")
        cut = await served.post(PATH, {**BODY, "max_tokens": 18})
        assert cut["choices"][0]["message"]["content"] == "" and cut["choices"][0]["message"]["reasoning_content"]
        choice = await served.post(PATH, {**BODY, "guided_choice": ["yes"]})
        assert choice["choices"][0]["message"] == {"role": "assistant", "content": "yes", "refusal": None}

    template = THINKING + ("<think>\n" if opened else "")
    serve(with_template(text_bundle, tmp_path / "bundle", template), scenario, backend, num_kv_blocks=1024)

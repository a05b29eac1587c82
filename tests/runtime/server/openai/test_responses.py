"""`/v1/responses`: whole and streamed, with instructions, forms, tools and reasoning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.runtime.server.openai.serving import MODEL, Serve, Served, serve, with_template
from tests.runtime.server.openai.test_chat import HERMES, THINKING, shared_template

PATH = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Bern", "Oslo"]}}, "required": ["city"]},
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Bern"}}</tool_call>'


async def streamed(served: Served, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await served.client.post(PATH, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    events = []
    frames = answer.text.split("\n\n")
    assert frames.pop() == ""
    for number, frame in enumerate(frames):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == number
        events.append(event)
    return events


def names(events: list[dict[str, Any]]) -> list[str]:
    kinds = [event["type"].removeprefix("response.") for event in events]
    return [kind for place, kind in enumerate(kinds) if place == 0 or kinds[place - 1] != kind]


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_ids(item) for key, item in value.items() if key not in ("id", "call_id", "created_at")}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


def test_an_answer_to_a_text(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        served.say("on the mat")
        body = {
            "model": MODEL,
            "input": "the cat?",
            "instructions": "Be brief.",
            "temperature": 0,
            "metadata": {"a": "b"},
        }
        answer = await served.post(PATH, body)
        assert answer["object"] == "response" and answer["id"].startswith("resp_") and answer["status"] == "completed"
        [message] = answer["output"]
        assert message["type"] == "message" and message["role"] == "assistant" and message["status"] == "completed"
        assert message["content"] == [{"type": "output_text", "text": "on the mat", "annotations": [], "logprobs": []}]
        assert (answer["instructions"], answer["metadata"], answer["store"]) == ("Be brief.", {"a": "b"}, False)
        assert answer["text"] == {"format": {"type": "text"}} and answer["tool_choice"] == "auto"
        prompt = served.llm.require_tokenizer().encode("<|system|>Be brief.<|user|>the cat?<|assistant|>", False)
        usage = answer["usage"]
        assert usage["input_tokens"] == len(prompt) and usage["output_tokens_details"] == {"reasoning_tokens": 0}
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]

    served(scenario)


def test_a_streamed_answer(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        served.say("on the mat")
        body = {"input": [{"role": "user", "content": [{"type": "input_text", "text": "the cat?"}]}], "temperature": 0}
        whole = await served.post(PATH, body)
        events = await streamed(served, body)
        assert names(events) == [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "completed",
        ]
        assert "".join(event["delta"] for event in events if "delta" in event) == "on the mat"
        assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
        assert events[2]["item"]["content"] == [] and events[2]["item"]["status"] == "in_progress"
        assert len({event["item_id"] for event in events if "item_id" in event}) == 1
        cached = {"input_tokens_details": None}
        final = events[-1]["response"]
        assert without_ids({**final, "usage": {**final["usage"], **cached}}) == without_ids(
            {**whole, "usage": {**whole["usage"], **cached}}
        )

    served(scenario)


def test_an_answer_that_is_cut_short(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        served.say("on the mat")
        body = {"input": "the cat?", "max_output_tokens": 2}
        answer = await served.post(PATH, body)
        assert answer["status"] == "incomplete" and answer["incomplete_details"] == {"reason": "max_output_tokens"}
        events = await streamed(served, body)
        assert events[-1]["type"] == "response.incomplete"
        assert without_ids(events[-1]["response"]["output"]) == without_ids(answer["output"])
        served.say("")
        answer, events = await served.post(PATH, {"input": "the cat?"}), await streamed(served, {"input": "the cat?"})
        assert answer["output"][0]["content"][0]["text"] == ""
        assert without_ids(events[-1]["response"]["output"]) == without_ids(answer["output"])

    served(scenario)


def test_the_form_of_the_answer_and_logprobs(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        wanted = {"type": "json_schema", "name": "x", "schema": {"enum": ["yes", "no"]}, "strict": True}
        body = {"input": "the cat?", "text": {"format": wanted}, "top_logprobs": 1, "include": []}
        answer = await served.post(PATH, body)
        [part] = answer["output"][0]["content"]
        assert part["text"] in ('"yes"', '"no"') and answer["text"]["format"]["schema"] == wanted["schema"]
        assert "".join(entry["token"] for entry in part["logprobs"]).startswith(part["text"])
        events = await streamed(served, body)
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        assert all(len(delta["logprobs"]) == 1 for delta in deltas)

    served(scenario)


def test_tools(shared_data: Path, text_bundle: Path, backend: Any, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        served.say(f"Let me see.\n{CALL}")
        body = {"input": "Weather?", "tools": [TOOL], "temperature": 0}
        answer = await served.post(PATH, body)
        text, call = answer["output"]
        assert text["content"][0]["text"] == "Let me see." and call["type"] == "function_call"
        assert (call["name"], call["arguments"]) == ("get_weather", '{"city": "Bern"}')
        events = await streamed(served, body)
        assert without_ids(events[-1]["response"]["output"]) == without_ids(answer["output"])
        assert "function_call_arguments.done" in names(events)
        pieces = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
        assert "".join(pieces) == call["arguments"] and len(pieces) > 1

        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "21 °C"}
        served.say("Warm.")
        given = [{"role": "user", "content": "Weather?"}, {"type": "reasoning", "content": []}, text, call, output]
        answer = await served.post(PATH, {**body, "input": given})
        assert answer["output"][0]["content"][0]["text"] == "Warm."
        forced = await served.post(PATH, {**body, "tool_choice": {"type": "function", "name": "get_weather"}})
        assert [item["type"] for item in forced["output"]] == ["function_call"]

    bundle = with_template(text_bundle, tmp_path / "bundle", shared_template(shared_data, HERMES))
    serve(bundle, scenario, backend, num_kv_blocks=1024)


def test_reasoning(text_bundle: Path, backend: Any, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        served.say("<think>\nHm.\n</think>\n\nYes.")
        body = {"input": "the cat?", "reasoning": {"effort": "low"}}
        answer = await served.post(PATH, body)
        thought, message = answer["output"]
        assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}] and thought["summary"] == []
        assert message["content"][0]["text"] == "Yes." and answer["reasoning"]["effort"] == "low"
        assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 3
        events = await streamed(served, body)
        assert without_ids(events[-1]["response"]["output"]) == without_ids(answer["output"])
        assert "reasoning_text.delta" in names(events)

    serve(with_template(text_bundle, tmp_path / "bundle", THINKING), scenario, backend, num_kv_blocks=1024)


def test_what_is_not_served_is_said(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        for fields, param in (
            ({"previous_response_id": "resp_1"}, "previous_response_id"),
            ({"background": True}, "background"),
            ({"conversation": "c"}, "conversation"),
            ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
            ({"input": [{"type": "message", "content": "x"}]}, "input.0.role"),
            ({"input": [{"type": "function_call", "call_id": "x"}]}, "input.0.name"),
            ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "messages.0.content.0"),
            ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
            ({"max_tokens": 5}, "max_tokens"),
        ):
            error = await served.refused(PATH, {"input": "the cat?", **fields})
            assert error["param"] == param, (fields, error)

    served(scenario)

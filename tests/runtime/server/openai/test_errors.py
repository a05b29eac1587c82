"""Whatever is wrong with a request, it is told as OpenAI tells it: a status, and a body that names the field."""

from __future__ import annotations

import json
import threading
from typing import Any

from inferencex.runtime.server.service import ServiceLimits
from tests.runtime.server.openai.serving import MODEL, Serve, Served

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "the cat?"}]


def test_wrong_values_are_400_and_name_the_field(served: Serve) -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"max_tokens": "5"}, "max_tokens", "expected a valid integer"),
        ({"max_tokens": 5.5}, "max_tokens", "expected"),
        ({"max_tokens": -1}, "max_tokens", "expected greater than or equal to 0"),
        ({"max_tokens": 10**400}, "max_tokens", "expected"),
        ({"max_tokens": True}, "max_tokens", "expected a valid integer"),
        ({"temperature": "hot"}, "temperature", "expected a valid number"),
        ({"temperature": -0.1}, "temperature", "expected"),
        ({"temperature": 10**400}, "temperature", "expected"),
        ({"top_p": 0}, "top_p", "expected"),
        ({"n": 0}, "n", "expected"),
        ({"n": 2, "temperature": 0}, "n", "temperature"),
        ({"stop": ""}, "stop", "empty"),
        ({"stop": 5}, "stop", "expected a valid string or a valid list"),
        ({"stop": ["a", 5]}, "stop.1", "expected a valid string"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token id"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "expected"),
        ({"logit_bias": {"999999": 1}}, None, "vocabulary"),
        ({"logit_bias": [1]}, "logit_bias", "expected a valid dictionary"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0", "expected"),
        ({"seed": 2**70}, "seed", "expected"),
        ({"presence_penalty": 3}, "presence_penalty", "expected"),
        ({"stream": "yes"}, "stream", "expected a valid boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"stream": True, "stream_options": {"include_use": True}}, "stream_options.include_use", "'include_usage'"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "expected"),
        ({"response_format": {"type": "json_schema", "json_shema": {}}}, "response_format.json_shema", "'json_schema'"),
        ({"max_token": 5}, "max_token", "did you mean 'max_tokens'?"),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'?"),
        ({"max_new_tokens": 1}, "max_new_tokens", "did you mean 'max_tokens'?"),
        ({"foo_bar_baz": 1}, "foo_bar_baz", "remove it"),
        ({"Max-Tokens": 1}, "Max-Tokens", "unknown field"),
        ({"x" * 5000: 1}, "x" * 60, "unknown field"),
        ({"stop": "a" * 5000, "seed": "b" * 5000}, "seed", "expected a valid integer"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "more than max_tokens"),
        ({"guided_choice": []}, "guided_choice", "expected"),
        ({"guided_json": "{"}, "guided_json", "JSON"),
    ]

    async def scenario(served: Served) -> None:
        for path, base in ((COMPLETIONS, {"prompt": "the cat"}), (CHAT, {"messages": USER})):
            for fields, param, message in cases:
                error = await served.refused(path, {**base, **fields})
                assert error["type"] == "invalid_request_error", fields
                assert (error["param"], message in error["message"]) == (param, True), (fields, error)
        for fields, param in (
            ({}, "prompt"),
            ({"promt": "x"}, "promt"),
            ({"prompt": None}, "prompt"),
            ({"prompt": 5}, "prompt"),
            ({"prompt": [5, "a"]}, "prompt.1"),
            ({"prompt": ["a", 5]}, "prompt.1"),
            ({"prompt": [[1, 2], [3, -4]]}, "prompt.1.1"),
            ({"prompt": []}, "prompt"),
            ({"prompt": [999999]}, None),
            ({"prompt": "a", "logprobs": 21}, "logprobs"),
            ({"prompt": "a", "logprobs": True}, "logprobs"),
            ({"prompt": "a", "suffix": "b"}, "suffix"),
        ):
            error = await served.refused(COMPLETIONS, fields)
            assert error["param"] == param, (fields, error)
        for fields, param in (
            ({}, "messages"),
            ({"messages": "hello"}, "messages"),
            ({"messages": [{"content": "x"}]}, "messages.0.role"),
            ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
            ({"messages": USER, "tools": [{"type": "function", "function": {"nam": "f"}}]}, "tools.0.function.nam"),
            ({"messages": USER, "functions": []}, "functions"),
            ({"messages": USER, "max_tokens": 0}, "max_tokens"),
        ):
            error = await served.refused(CHAT, fields)
            assert error["param"] == param, (fields, error)

    served(scenario)


def test_bodies_that_are_no_requests(served: Serve) -> None:
    bodies: list[bytes] = [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"{'prompt': 'x'}",
        b'{"prompt": "\xff"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "guided_json": {"a": Infinity}}',
        b'{"prompt": "x", "metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "x", "metadata": ' + b'{"a":' * 150 + b"1" + b"}" * 150 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "x"} {"prompt": "y"}',
        b"\x00\x01",
    ]

    async def scenario(served: Served) -> None:
        for content in bodies:
            for kind in ("application/json", "text/plain", None):
                headers = {} if kind is None else {"Content-Type": kind}
                answer = await served.client.post(COMPLETIONS, content=content, headers=headers)
                assert answer.status_code == 400, (content[:60], answer.text)
                assert answer.json()["error"]["type"] == "invalid_request_error"
        answer = await served.client.post(COMPLETIONS, content=b'{"prompt": "x"}')
        assert answer.status_code == 200  # without any content type it is JSON
        answer = await served.client.post(
            COMPLETIONS, content=b'{"prompt": "x"}', headers={"Content-Type": "text/plain"}
        )
        assert answer.status_code == 400 and "Content-Type: application/json" in answer.json()["error"]["message"]

    served(scenario)


def test_a_prompt_that_does_not_fit_is_told_with_the_numbers(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        error = await served.refused(COMPLETIONS, {"prompt": [5] * 30, "max_tokens": 10})
        assert error["code"] == "context_length_exceeded"
        assert "30 prompt tokens + max_tokens=10 make 40" in error["message"] and "32" in error["message"]
        assert (await served.refused(CHAT, {"messages": [{"role": "user", "content": "the cat " * 60}]}))["code"]

    served(scenario, max_model_len=32)


def test_models_that_are_not_there(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        for path, body in (
            (COMPLETIONS, {"prompt": "x"}),
            (CHAT, {"messages": USER}),
            ("/v1/responses", {"input": "x"}),
            ("/v1/embeddings", {"input": "x"}),
            ("/tokenize", {"prompt": "x"}),
            ("/detokenize", {"tokens": [5]}),
        ):
            error = await served.refused(path, {"model": "other", **body}, 404)
            assert (error["code"], error["param"], error["type"]) == ("model_not_found", "model", "not_found_error")
        answer = await served.client.get("/v1/models/other/than")
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"

    served(scenario)


def test_models_are_listed(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        listed = (await served.client.get("/v1/models")).json()
        assert listed["object"] == "list"
        [model] = listed["data"]
        assert (model["id"], model["object"], model["max_model_len"]) == (MODEL, "model", 8192)
        assert (await served.client.get(f"/v1/models/{MODEL}")).json() == model

    served(scenario)


def test_tokens_and_texts(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        text = "the cat 日本 🙂"
        told = await served.post("/tokenize", {"prompt": text, "return_token_strs": True})
        assert told["count"] == len(told["tokens"]) and told["max_model_len"] == 8192
        assert told["token_strs"][0] == "the"
        assert (await served.post("/detokenize", {"tokens": told["tokens"]}))["prompt"] == text
        chat = await served.post("/tokenize", {"messages": USER, "add_generation_prompt": False})
        assert (await served.post("/detokenize", {"tokens": chat["tokens"]}))["prompt"] == "<|user|>the cat?"
        assert (await served.refused("/tokenize", {"prompt": "a", "messages": USER}))["param"] == "prompt"
        assert (await served.refused("/detokenize", {"tokens": [5, 999999]}))["param"] == "tokens.1"
        assert (await served.refused("/detokenize", {"tokens": [5, -1]}))["param"] == "tokens.1"
        assert (await served.refused("/detokenize", {"tokens": "abc"}))["param"] == "tokens"

    served(scenario)


def test_limits_of_the_server(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        assert (await served.refused(COMPLETIONS, {"prompt": "x", "n": 4}))["param"] == "n"
        assert (await served.refused(COMPLETIONS, {"prompt": "x", "best_of": 4}))["param"] == "n"
        assert (await served.refused(COMPLETIONS, {"prompt": ["x"] * 3}))["param"] == "prompt"
        served.service.begin_drain()
        error = await served.refused(COMPLETIONS, {"prompt": "x"}, 503)
        assert error["code"] == "shutting_down"

    served(scenario, limits=ServiceLimits(max_n=3, max_prompts=2))


def test_a_request_may_take_only_so_long(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        model: Any = served.llm.engine.executable
        told, steps = threading.Event(), 0

        def linger(batch: Any) -> None:  # once the answer has begun, until the client knows that it took too long
            nonlocal steps
            steps += 1
            assert steps < 5 or told.wait(30)

        body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}
        model.before_step = linger
        assert (await served.refused(COMPLETIONS, body, 504))["code"] == "timeout"
        told.set()
        await served.service.drained()
        told.clear()
        steps = 0
        answer = await served.client.post(COMPLETIONS, json={**body, "stream": True})
        told.set()
        assert json.loads(answer.text.split("\n\n")[-3].removeprefix("data: "))["error"]["code"] == "timeout"
        assert (await served.refused(COMPLETIONS, {**body, "timeout": 0.5}))["param"] == "timeout"

    served(scenario, limits=ServiceLimits(request_timeout=0.5))


def test_errors_of_a_stream(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        from inferencex.formats.errors import BackendError

        body = {"prompt": "x", "max_tokens": 50, "stream": True}
        model: Any = served.llm.engine.executable
        steps = []

        def fail_later(batch: Any) -> None:
            steps.append(batch)
            if len(steps) == fail_at:
                raise BackendError("the device is on fire")

        model.before_step = fail_later
        fail_at = 5
        answer = await served.client.post(COMPLETIONS, json=body)
        frames = answer.text.split("\n\n")
        assert answer.status_code == 200 and frames[-2:] == ["data: [DONE]", ""]
        error = json.loads(frames[-3].removeprefix("data: "))["error"]
        assert (error["type"], error["message"]) == ("server_error", "the device is on fire")
        # What fails before the first token is an ordinary error.
        fail_at = len(steps) + 1
        assert (await served.refused(COMPLETIONS, body, 500))["message"] == "the device is on fire"
        fail_at = len(steps) + 3
        answer = await served.client.post("/v1/responses", json={"input": "x", "stream": True})
        [last] = [frame for frame in answer.text.split("\n\n") if frame.startswith("event: response.failed")]
        told = json.loads(last.split("\n")[1].removeprefix("data: "))["response"]
        assert told["status"] == "failed" and told["error"]["message"] == "the device is on fire"

    served(scenario)


def test_every_status_is_in_the_api_document(served: Serve) -> None:
    async def scenario(served: Served) -> None:
        document = (await served.client.get("/openapi.json")).json()
        for path, operations in document["paths"].items():
            for operation in operations.values():
                statuses = set(operation["responses"])
                assert {"200", "400", "401", "403", "404", "413", "429", "500", "503", "504"} <= statuses, path
                assert "422" not in statuses

    served(scenario)

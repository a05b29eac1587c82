"""From messages to calls: every field arrives, and every bad one is blamed by name."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, cast

import grpc
import pytest

from inferencex.runtime import LLM, SamplingParams
from inferencex.runtime.server.calls import ANONYMOUS, Chat
from inferencex.runtime.server.errors import InvalidRequest
from inferencex.runtime.server.grpc.access import Incoming
from inferencex.runtime.server.grpc.requests import generate_call, read_chat
from inferencex.runtime.server.grpc.v1 import inference_pb2 as pb
from inferencex.runtime.structured import Grammar
from tests.runtime.server.grpc.calling import Scene, call, chat, failure, generate, metadata

INCOMING = Incoming(ANONYMOUS, "r1", 2.5, {"traceparent": "00-1"})
EVERY_FIELD: dict[str, Any] = {
    "n": 2,
    "temperature": 0.7,
    "top_k": 11,
    "top_p": 0.8,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {3: 1.5, 9: -100.0},
    "seed": -5,
    "stop": ("a", "b"),
    "stop_token_ids": (4, 5),
    "include_stop_str_in_output": True,
    "min_tokens": 2,
    "max_tokens": 30,
    "ignore_eos": True,
    "logprobs": 0,
    "prompt_logprobs": 2,
    "prompt_logprobs_start": 3,
    "skip_special_tokens": False,
}
FORMATS = [
    (pb.ResponseFormat(json_object=True), Grammar.json_object()),
    (pb.ResponseFormat(json_schema='{"type": "integer"}'), Grammar.json_schema({"type": "integer"})),
    (pb.ResponseFormat(regex="[ab]+"), Grammar.regex("[ab]+")),
    (pb.ResponseFormat(lark='start: "x"'), Grammar.lark('start: "x"')),
    (pb.ResponseFormat(choice=pb.Choices(values=["yes", "no"])), Grammar.choice(["yes", "no"])),
]


def test_every_sampling_field_arrives() -> None:
    assert set(EVERY_FIELD) == {field.name for field in fields(SamplingParams)}
    assert set(EVERY_FIELD) == set(pb.SamplingParams.DESCRIPTOR.fields_by_name)
    request = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(**EVERY_FIELD))
    assert generate_call(request, INCOMING, stream=False).params == SamplingParams(**EVERY_FIELD)


def test_very_many_messages_are_refused_before_they_are_read() -> None:
    call = pb.ToolCall(id="c", name="f", arguments="{}")
    for request in (
        pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="x")] * 16385),
        pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="x")], tools=["{}"] * 16384),
        pb.ChatRequest(messages=[pb.ChatMessage(role="assistant", tool_calls=[call] * 16384)]),
    ):
        with pytest.raises(InvalidRequest, match="16385 messages, calls and tools; this server takes at most 16384"):
            read_chat(request, INCOMING, cast(Any, None), stream=False)


def test_fields_that_are_not_set_are_the_model_s_to_choose() -> None:
    made = generate_call(pb.GenerateRequest(text="x"), INCOMING, stream=True)
    assert made.params == SamplingParams()
    assert (made.model, made.priority, made.grammar, made.add_special_tokens) == (None, None, None, True)
    assert (made.request_id, made.timeout, made.stream) == ("r1", 2.5, True)
    assert made.trace_headers == {"traceparent": "00-1"}
    zero = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1, 2]), sampling=pb.SamplingParams(temperature=0, top_k=0, seed=0), priority=0
    )
    made = generate_call(zero, INCOMING, stream=False)
    assert made.params == SamplingParams(temperature=0.0, top_k=0, seed=0)
    assert (made.prompt, made.priority) == ((1, 2), 0)


@pytest.mark.parametrize(("message", "grammar"), FORMATS, ids=lambda value: getattr(value, "kind", ""))
def test_response_formats(message: pb.ResponseFormat, grammar: Grammar) -> None:
    request = pb.GenerateRequest(text="x", response_format=message)
    assert generate_call(request, INCOMING, stream=False).grammar == grammar


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 3, "temperature": 0}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logit_bias": {3: 101}}, "logit_bias"),
        ({"logit_bias": {3: math.nan}}, "logit_bias"),
        ({"logit_bias": {-3: 1}}, "logit_bias"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ],
)
def test_bad_sampling_fields_are_blamed(sampling: dict[str, Any], param: str) -> None:
    request = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(**sampling))
    with pytest.raises(InvalidRequest) as caught:
        generate_call(request, INCOMING, stream=False)
    assert caught.value.param == f"sampling.{param}"


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (pb.GenerateRequest(), "prompt"),
        (pb.GenerateRequest(text="x", response_format=pb.ResponseFormat(json_object=False)), "json_object"),
        (pb.GenerateRequest(text="x", response_format=pb.ResponseFormat(json_schema="{")), "json_schema"),
        (pb.GenerateRequest(text="x", response_format=pb.ResponseFormat(json_schema="[1]")), "json_schema"),
        (pb.GenerateRequest(text="x", response_format=pb.ResponseFormat(json_schema="")), "json_schema"),
        (pb.GenerateRequest(text="x", response_format=pb.ResponseFormat(regex="")), "regex"),
        (pb.GenerateRequest(text="x", response_format=pb.ResponseFormat(lark="")), "lark"),
        (pb.GenerateRequest(text="x", response_format=pb.ResponseFormat(choice=pb.Choices())), "choice"),
        (pb.GenerateRequest(text="x", response_format=pb.ResponseFormat(choice=pb.Choices(values=[""]))), "choice"),
    ],
)
def test_bad_requests_are_blamed(request_: pb.GenerateRequest, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        generate_call(request_, INCOMING, stream=False)
    assert caught.value.param in (param, f"response_format.{param}")
    assert "structured_outputs" not in str(caught.value)


def test_what_only_the_model_can_refuse(llm: LLM) -> None:
    cases = [
        (pb.GenerateRequest(token_ids=pb.TokenIds()), "the prompt has no tokens"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[100_000])), "not in the vocabulary"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[-1])), "not in the vocabulary"),
        (generate(max_tokens=100_000), "more than the context"),
        (generate(logprobs=100_000), "more than the vocabulary"),
        (generate(stop_token_ids=[100_000]), "not in the vocabulary"),
        (generate(logit_bias={100_000: 1}), "not in the vocabulary"),
        (pb.GenerateRequest(text="x", response_format=pb.ResponseFormat(regex="(")), "regular expression"),
        (pb.GenerateRequest(text="x", response_format=pb.ResponseFormat(lark="start: (")), "grammar"),
    ]

    async def scenario(scene: Scene) -> None:
        for request, message in cases:
            error = await failure(scene.stub.Generate(request))
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error.details()
            assert message in (error.details() or ""), error.details()
            assert metadata(error)["inferencex-error-type"] == "invalid_request_error"
        error = await failure(scene.stub.Generate(generate(max_tokens=100_000)))
        assert metadata(error)["inferencex-error-code"] == "context_length_exceeded"
        assert (await scene.stub.Generate(generate())).choices

    call(llm, scenario)


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (pb.ChatRequest(), "messages"),
        (pb.ChatRequest(messages=[pb.ChatMessage(content="no role")]), "messages.0.role"),
        (chat(tools=["{"]), "tools.0"),
        (chat(tools=["[]"]), "tools.0"),
        (chat(tools=['{"type": "function", "function": {}}']), "tools.0.function.name"),
        (chat(tool_choice="required"), "tool_choice"),
        (chat(tool_choice="weather"), "tool_choice"),
        (chat(chat_template_kwargs="3"), "chat_template_kwargs"),
        (chat(chat_template_kwargs='{"messages": []}'), "chat_template_kwargs"),
        (chat(response_format=pb.ResponseFormat(json_schema="nope")), "response_format.json_schema"),
        (chat(add_generation_prompt=True, continue_final_message=True), "continue_final_message"),
        (chat(max_tokens=0), "sampling.max_tokens"),
    ],
)
def test_bad_chats_are_blamed(llm: LLM, request_: pb.ChatRequest, param: str) -> None:
    async def scenario(scene: Scene) -> None:
        error = await failure(scene.stub.Chat(request_))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error.details()
        assert metadata(error)["inferencex-error-param"] == param
        error = await failure(scene.stub.ChatStream(request_).read())
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error.details()

    call(llm, scenario)


def test_a_chat_arrives_whole(llm: LLM) -> None:
    async def scenario(scene: Scene) -> None:
        messages = [
            pb.ChatMessage(role="user", content="hi", name="Ann"),
            pb.ChatMessage(
                role="assistant",
                reasoning_content="hm",
                tool_calls=[pb.ToolCall(id="c1", name="f", arguments='{"b": 1, "a": 2}')],
            ),
            pb.ChatMessage(role="tool", content="3", tool_call_id="c1"),
        ]
        request = pb.ChatRequest(
            messages=messages,
            sampling=pb.SamplingParams(**EVERY_FIELD),
            priority=3,
            add_generation_prompt=False,
            chat_template_kwargs='{"enable_thinking": false}',
            response_format=pb.ResponseFormat(regex="[ab]+"),
        )
        made = read_chat(request, INCOMING, scene.service, stream=True).call
        assert made.params == SamplingParams(**EVERY_FIELD)
        assert (made.priority, made.timeout, made.kind, made.stream) == (3, 2.5, "grpc.chat", True)
        assert made.grammar == Grammar.regex("[ab]+")
        assert isinstance(made.prompt, Chat)
        first, second, third = made.prompt.messages
        assert (first["role"], first["content"], first["name"]) == ("user", "hi", "Ann")
        assert second["reasoning_content"] == "hm"
        [asked] = second["tool_calls"]
        assert asked["id"] == "c1" and list(asked["function"]["arguments"].items()) == [("b", 1), ("a", 2)]
        assert (third["role"], third["tool_call_id"]) == ("tool", "c1")
        assert not made.prompt.add_generation_prompt
        assert made.prompt.variables == {"enable_thinking": False}

    call(llm, scenario)

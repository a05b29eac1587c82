"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from inferencex.runtime.server.openai.protocol.base import Ignored, Object, Request, Response, omitted_if_none
from inferencex.runtime.server.openai.protocol.sampling import MaxTokens, SamplingFields
from inferencex.runtime.server.openai.protocol.usage import Usage

MAX_LOGPROBS = 20
MAX_MESSAGES = 1 << 14
FunctionName = Annotated[str, Field(min_length=1, max_length=256)]


class _Open(BaseModel):
    """Part of a message: fields that are not known are left to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, use_attribute_docstrings=True)


class ContentPart(_Open):
    """A part of a message; only texts are read."""

    type: str
    text: str | None = None


class CalledFunction(_Open):
    """What was called."""

    name: FunctionName
    arguments: str | Object | None = None
    """JSON as a text, or the object itself."""


class MessageToolCall(_Open):
    """A call that the assistant made."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class Message(_Open):
    """One message of a conversation."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class Function(Request):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: Object | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None


class Tool(Request):
    """Something that the model may use."""

    type: Literal["function"]
    function: Function


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
Tools = Annotated[list[Tool], Field(fail_fast=True)]


class _NamedFunction(Request):
    name: FunctionName


class NamedToolChoice(Request):
    """The function that must be called."""

    type: Literal["function"]
    function: _NamedFunction


class ChatRequest(SamplingFields):
    """A conversation to answer."""

    messages: Messages
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    """Most tokens of an answer; by default as many as fit."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    """Handed to the chat template."""
    modalities: list[Literal["text"]] | None = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Go on with the last message in place of answering it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, such as `enable_thinking`."""

    prediction: Ignored = None
    verbosity: Ignored = None


class TopLogprob(Response):
    """A token at one place, and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None
    """The token's bytes in UTF-8; a token may end inside a character."""


class TokenLogprob(TopLogprob):
    """The chosen token, and the likeliest ones at its place."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(Response):
    """Log-probabilities of an answer's tokens."""

    content: list[TokenLogprob] | None
    refusal: None = None


class AnsweredFunction(Response):
    """What the model calls."""

    name: str
    arguments: str
    """A JSON object, as the model wrote it."""


class ToolCall(Response):
    """A call that the model makes."""

    id: str
    type: Literal["function"] = "function"
    function: AnsweredFunction


class AnswerMessage(Response):
    """The answer's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = omitted_if_none()
    tool_calls: list[ToolCall] | None = omitted_if_none()


class ChatChoice(Response):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None = None
    token_ids: list[int] | None = omitted_if_none()


class ChatCompletion(Response):
    """All answers."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = omitted_if_none()

"""`/v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from inferencex.runtime.server.openai.protocol.base import MAX_INTEGER, Ignored, Object, Request, Response, Texts
from inferencex.runtime.server.openai.protocol.chat import (
    MAX_LOGPROBS,
    MAX_MESSAGES,
    ContentPart,
    FunctionName,
    TokenLogprob,
)
from inferencex.runtime.server.openai.protocol.sampling import Seed


class InputItem(BaseModel):
    """A message, a call that the assistant made (`function_call`), what came of it (`function_call_output`), or what
    the assistant thought (`reasoning`).
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, use_attribute_docstrings=True)

    type: Annotated[str, Field(max_length=64)] | None = None
    role: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    call_id: str | None = None
    name: FunctionName | None = None
    arguments: str | None = None
    output: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None


class TextFormat(Request):
    """What form the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(default=None, max_length=256)
    description: str | None = None
    schema_: Object | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Request):
    """How the answer is written."""

    format: TextFormat | None = None
    verbosity: Ignored = None


class ReasoningOptions(Request):
    """How much to think."""

    effort: Annotated[str, Field(max_length=32)] | None = None
    """Handed to the chat template."""
    summary: Ignored = None
    generate_summary: Ignored = None


class FunctionTool(Request):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None


class FunctionChoice(Request):
    """The function that must be called."""

    type: Literal["function"]
    name: FunctionName


class ResponsesStreamOptions(Request):
    """What a stream holds beside the text."""

    include_obfuscation: Ignored = None


class ResponsesRequest(Request):
    """Something to answer."""

    input: str | Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = Field(default=None, max_length=512)
    instructions: str | None = None
    """A system message in front of the input."""
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_INTEGER)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    include: Texts | None = None
    """`message.output_text.logprobs` adds log-probabilities; others have no effect."""
    truncation: Literal["disabled"] | None = None
    previous_response_id: str | None = None
    """Responses are not stored here: send the whole conversation as `input`."""
    background: bool | None = None
    """Answers are made at once or not at all: true is refused."""
    conversation: None = None
    prompt: None = None

    seed: Seed | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INTEGER)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.001, le=1000.0)] | None = None
    priority: Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)] | None = None
    timeout: Annotated[float, Field(ge=1.0, le=86400.0)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    metadata: dict[str, JsonValue] | None = None
    user: str | None = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    max_tool_calls: Ignored = None


class OutputText(Response):
    """Text of the answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[JsonValue] = Field(default_factory=list)
    logprobs: list[TokenLogprob] = Field(default_factory=list)


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(Response):
    """The answer."""

    type: Literal["message"] = "message"
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class FunctionCall(Response):
    """A call that the model makes."""

    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class ReasoningText(Response):
    """Text that the model thought."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class ReasoningItem(Response):
    """What the model thought."""

    type: Literal["reasoning"] = "reasoning"
    id: str
    summary: list[JsonValue] = Field(default_factory=list)
    content: list[ReasoningText]
    status: ItemStatus


OutputItem = OutputMessage | FunctionCall | ReasoningItem


class InputTokensDetails(Response):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class OutputTokensDetails(Response):
    """What the answer's tokens were for."""

    reasoning_tokens: int
    """Tokens that the text of the reasoning makes."""


class ResponsesUsage(Response):
    """Tokens of a request."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Response):
    """Why an answer is not whole."""

    reason: Literal["max_output_tokens"]


class ResponseError(Response):
    """Why a streamed answer failed."""

    code: str
    message: str


class ResponseObject(Response):
    """The answer, with what it was asked for."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, str | None]
    store: Literal[False] = False
    temperature: float | None
    text: dict[str, JsonValue]
    tool_choice: str | dict[str, JsonValue]
    tools: list[dict[str, JsonValue]]
    top_p: float | None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None
    metadata: dict[str, JsonValue]

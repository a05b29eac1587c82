"""From messages of `inference.proto` to what the service is asked: calls, with parameters, prompts and formats."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from inferencex.formats.errors import RequestError
from inferencex.runtime.params import SamplingParams
from inferencex.runtime.server.calls import Call
from inferencex.runtime.server.errors import InvalidRequest, invalid
from inferencex.runtime.server.grpc.access import Incoming
from inferencex.runtime.server.grpc.v1 import inference_pb2 as pb
from inferencex.runtime.server.openai.context import Context
from inferencex.runtime.server.openai.conversation import Conversation, conversation
from inferencex.runtime.server.openai.grammars import requested_grammar
from inferencex.runtime.server.openai.protocol.chat import MAX_MESSAGES, ChatRequest
from inferencex.runtime.server.openai.protocol.sampling import SamplingFields, StructuredOutputs
from inferencex.runtime.server.openai.validation import invalid_request
from inferencex.runtime.server.service import InferenceService

_FIRST_WORD = re.compile(r"[a-z_]+")
_FORMATS = {"json_schema": "json", "lark": "grammar"}  # named differently in the HTTP API
_CHOICES = ("auto", "none", "required")


def generate_call(request: pb.GenerateRequest, incoming: Incoming, *, stream: bool) -> Call:
    """Return what Generate asks for. Raises InvalidRequest, naming the field to blame."""
    fields = SamplingFields(structured_outputs=_structured_outputs(request.response_format))
    with _format_blamed(request.response_format):
        grammar = requested_grammar(fields)
    return Call(
        model=request.model or None,
        prompt=_prompt(request),
        params=_sampling_params(request.sampling),
        request_id=incoming.request_id,
        kind="grpc.generate",
        priority=request.priority if request.HasField("priority") else None,
        grammar=grammar,
        add_special_tokens=request.add_special_tokens if request.HasField("add_special_tokens") else True,
        stream=stream,
        timeout=incoming.timeout,
        trace_headers=incoming.trace_headers,
    )


def read_chat(request: pb.ChatRequest, incoming: Incoming, service: InferenceService, *, stream: bool) -> Conversation:
    """Return what Chat asks for, and how its answers are read: as the HTTP API does it.

    Raises InvalidRequest, naming the field to blame, and ModelNotFound.
    """
    params = _sampling_params(request.sampling)
    context = Context(service, incoming.caller, incoming.request_id, incoming.trace_headers)
    body = _chat_body(request, stream)
    with _format_blamed(request.response_format):
        read = conversation(context, body, "grpc.chat")
    if not read.call.params.skip_special_tokens:  # calls are written with special tokens
        params = replace(params, skip_special_tokens=False)
    return replace(read, call=replace(read.call, params=params, timeout=incoming.timeout))


def _prompt(request: pb.GenerateRequest) -> str | tuple[int, ...]:
    given = request.WhichOneof("prompt")
    if given == "text":
        return request.text
    if given == "token_ids":
        return tuple(request.token_ids.ids)
    raise InvalidRequest("there is no prompt; set text or token_ids", param="prompt")


def _sampling_params(message: pb.SamplingParams) -> SamplingParams:
    """Return the parameters of a request; the fields of both have the same names."""
    values: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.name == "logit_bias":
            values[field.name] = dict(value)
        else:
            values[field.name] = tuple(value) if field.name in ("stop", "stop_token_ids") else value
    try:
        return SamplingParams(**values)
    except RequestError as error:
        named = _FIRST_WORD.match(str(error))
        known = named is not None and named[0] in pb.SamplingParams.DESCRIPTOR.fields_by_name
        raise invalid(error, f"sampling.{named[0]}" if named is not None and known else "sampling") from error


def _structured_outputs(message: pb.ResponseFormat) -> StructuredOutputs | None:
    given = message.WhichOneof("format")
    if given is None:
        return None
    value: Any = list(message.choice.values) if given == "choice" else getattr(message, given)
    if not value:
        raise InvalidRequest(
            f"response_format.{given} is {value!r}; leave response_format out for any text",
            param=f"response_format.{given}",
        )
    if given == "json_schema":
        value = _object(value, "response_format.json_schema")
    return StructuredOutputs.model_validate({_FORMATS.get(given, given): value})


@contextmanager
def _format_blamed(message: pb.ResponseFormat) -> Iterator[None]:
    """Give an error of the format the name that the field has in this interface."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is not None and error.param.startswith("structured_outputs."):
            given = f"response_format.{message.WhichOneof('format')}"
            raise InvalidRequest(str(error).replace(error.param, given), code=error.code, param=given) from error
        raise


def _chat_body(request: pb.ChatRequest, stream: bool) -> ChatRequest:
    """Return the request as the HTTP API has it, without the fields of `sampling`."""
    count = len(request.messages) + len(request.tools)
    if count <= MAX_MESSAGES:
        count += sum(len(message.tool_calls) for message in request.messages)
    if count > MAX_MESSAGES:
        raise InvalidRequest(
            f"{count} messages, calls and tools; this server takes at most {MAX_MESSAGES}", param="messages"
        )
    fields: dict[str, Any] = {
        "model": request.model or None,
        "messages": [_message(message) for message in request.messages],
        "stream": stream,
    }
    if request.tools:
        fields["tools"] = [_object(tool, f"tools.{index}") for index, tool in enumerate(request.tools)]
    if request.tool_choice:
        named = {"type": "function", "function": {"name": request.tool_choice}}
        fields["tool_choice"] = request.tool_choice if request.tool_choice in _CHOICES else named
    if request.chat_template_kwargs:
        fields["chat_template_kwargs"] = _object(request.chat_template_kwargs, "chat_template_kwargs")
    for name in ("priority", "add_generation_prompt", "continue_final_message", "parallel_tool_calls"):
        if request.HasField(name):
            fields[name] = getattr(request, name)
    try:
        body = ChatRequest.model_validate(fields)
    except ValidationError as error:
        problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()]
        raise invalid_request(problems, ChatRequest) from error
    return body.model_copy(update={"structured_outputs": _structured_outputs(request.response_format)})


def _message(message: pb.ChatMessage) -> Mapping[str, Any]:
    values: dict[str, Any] = {"role": message.role}
    for name in ("content", "name", "reasoning_content", "tool_call_id"):
        if message.HasField(name):
            values[name] = getattr(message, name)
    if message.tool_calls:
        values["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return values


def _object(text: str, param: str) -> dict[str, Any]:
    """Return the JSON object that a field spells."""
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"{param} is not JSON: {error}", param=param) from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} is {text!r:.60}; expected a JSON object", param=param)
    return value

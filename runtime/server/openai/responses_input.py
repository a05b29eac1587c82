"""A request of `/v1/responses` as the chat request that it comes to."""

from __future__ import annotations

from typing import Any

from inferencex.runtime.server.errors import InvalidRequest
from inferencex.runtime.server.openai.protocol.chat import (
    CalledFunction,
    ChatRequest,
    ContentPart,
    Message,
    MessageToolCall,
)
from inferencex.runtime.server.openai.protocol.responses import FunctionChoice, InputItem, ResponsesRequest

_LOGPROBS = "message.output_text.logprobs"
_SAME_NAME = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "parallel_tool_calls",
    "seed",
    "top_k",
    "min_p",
    "repetition_penalty",
    "priority",
    "timeout",
    "chat_template_kwargs",
)


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """Return the chat request. Raises InvalidRequest for what is not served here."""
    if body.previous_response_id is not None:
        raise InvalidRequest(
            "responses are not stored here, so there is none to go on from; send the whole conversation as input",
            param="previous_response_id",
        )
    if body.background:
        raise InvalidRequest("responses are not stored here, so none can be made in the background", param="background")
    values: dict[str, Any] = {name: getattr(body, name) for name in _SAME_NAME}
    values["messages"] = _messages(body)
    values["max_completion_tokens"] = body.max_output_tokens
    if body.top_logprobs or _LOGPROBS in (body.include or []):
        values.update(logprobs=True, top_logprobs=body.top_logprobs)
    if body.tools:
        values["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in body.tools
        ]
    choice = body.tool_choice
    if isinstance(choice, FunctionChoice):
        values["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        values["tool_choice"] = choice
    if body.reasoning is not None:
        values["reasoning_effort"] = body.reasoning.effort
    wanted = None if body.text is None else body.text.format
    if wanted is not None and wanted.type == "json_schema":
        schema = {"name": wanted.name, "schema": wanted.schema_, "strict": wanted.strict}
        values["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif wanted is not None:
        values["response_format"] = {"type": wanted.type}
    return ChatRequest.model_validate(values)


def _messages(body: ResponsesRequest) -> list[Message]:
    messages = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    if isinstance(body.input, str):
        return [*messages, Message(role="user", content=body.input)]
    thought: str | None = None
    for index, item in enumerate(body.input):
        kind = item.type or "message"
        where = f"input.{index}"
        if kind == "message":
            if item.role is None:
                raise InvalidRequest(f"{where} is a message without a role", param=f"{where}.role")
            message = Message(role=item.role, content=item.content)
            if item.role == "assistant" and thought is not None:
                message.reasoning_content, thought = thought, None
            messages.append(message)
        elif kind == "function_call":
            _add_call(messages, item, where, thought)
            thought = None
        elif kind == "function_call_output":
            content = _present(item.output, f"{where}.output")
            messages.append(Message(role="tool", tool_call_id=item.call_id, content=content))
        elif kind == "reasoning":
            thought = _texts(item.content) or None
        else:
            raise InvalidRequest(f"{where} is of type {kind!r}, which is not served here", param=f"{where}.type")
    return messages


def _add_call(messages: list[Message], item: InputItem, where: str, thought: str | None) -> None:
    """Append a call to the assistant's message, which begins with its first call."""
    function = CalledFunction(name=_present(item.name, f"{where}.name"), arguments=item.arguments)
    call = MessageToolCall(id=item.call_id, type="function", function=function)
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant":
        last = Message(role="assistant", reasoning_content=thought)
        messages.append(last)
    last.tool_calls = [*(last.tool_calls or []), call]


def _present(value: Any, where: str) -> Any:
    if value is None:
        raise InvalidRequest(f"the field {where!r} is missing", param=where, code="missing_required_parameter")
    return value


def _texts(content: str | list[ContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text or "" for part in content)

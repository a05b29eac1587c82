"""Messages as chat templates expect them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from inferencex.runtime.server.errors import InvalidRequest
from inferencex.runtime.server.openai.protocol.chat import ContentPart, Message, MessageToolCall, Tool

_RESERVED = ("messages", "tools", "add_generation_prompt", "template", "self")
_TEXT_PARTS = ("text", "input_text", "output_text")


def template_messages(messages: Sequence[Message], template: str) -> list[dict[str, Any]]:
    """Return messages for a template of this text.

    Parts of a content are joined to one text, the arguments of calls become objects, and a "developer" is the system
    where the template knows none. Raises InvalidRequest for what is no text.
    """
    read = []
    for index, message in enumerate(messages):
        values = message.model_dump(exclude_none=True)
        values["content"] = _text(message.content, f"messages.{index}.content")
        if message.tool_calls:
            values["tool_calls"] = [_call(call) for call in message.tool_calls]
        else:
            values.pop("tool_calls", None)
        if message.role == "developer" and "developer" not in template:
            values["role"] = "system"
        read.append(values)
    return read


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return tools for a template; those that take no arguments say so, for templates look into the schema."""
    read = []
    for tool in tools:
        function = tool.function.model_dump(exclude_none=True, exclude={"strict"})
        function.setdefault("description", "")
        function.setdefault("parameters", {"type": "object", "properties": {}})
        read.append({"type": "function", "function": function})
    return read


def template_variables(values: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return further variables for a template. Raises InvalidRequest for those that have a field of their own."""
    variables = dict(values or {})
    for name in _RESERVED:
        if name in variables:
            raise InvalidRequest(
                f"chat_template_kwargs sets {name!r}, which has a field of its own", param="chat_template_kwargs"
            )
    documents = variables.get("documents")
    if documents is not None and not isinstance(documents, list):
        raise InvalidRequest("chat_template_kwargs.documents is not a list", param="chat_template_kwargs.documents")
    return variables


def _text(content: str | list[ContentPart] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        if part.type not in _TEXT_PARTS:
            raise InvalidRequest(
                f"{where}.{index} is of type {part.type[:40]!r}; this model reads only texts", param=f"{where}.{index}"
            )
        if part.text is None:
            raise InvalidRequest(f"{where}.{index} has no text", param=f"{where}.{index}.text")
        texts.append(part.text)
    return "\n".join(texts)


def _call(call: MessageToolCall) -> dict[str, Any]:
    values = call.model_dump(exclude_none=True)
    arguments = call.function.arguments
    values["type"] = "function"
    values["function"]["arguments"] = _object(arguments) if isinstance(arguments, str) else arguments or {}
    return values


def _object(arguments: str) -> Any:
    """Return the object that a text spells; the text itself, which templates write as it is, where it is none."""
    if not arguments.strip():
        return {}
    try:
        value = from_json(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments

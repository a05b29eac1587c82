"""Responses as every endpoint writes them."""

from __future__ import annotations

from typing import Any

from fastapi import Response
from pydantic import BaseModel

_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}  # in OpenAPI 3.1 the schema of a stream of events is that of one of them

STREAMED: dict[str, Any] = {
    "description": "The answer; with `stream`, events that end with `data: [DONE]`.",
    "content": {"text/event-stream": {"schema": _EVENT}},
}
"""For the 200 of endpoints that stream."""

_GONE = 499  # what logs say of a client that closed the connection; nobody receives it


def as_json(model: BaseModel) -> Response:
    """Return a model as the response."""
    return Response(model.model_dump_json(by_alias=True), media_type="application/json")


def gone() -> Response:
    """Return the response to a client that has left."""
    return Response(status_code=_GONE)

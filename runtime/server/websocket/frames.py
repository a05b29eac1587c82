"""Frames of a client as messages: which type, about which generation, and the fields."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from inferencex.runtime.server.errors import InvalidRequest
from inferencex.runtime.server.middleware.json_limits import check_json
from inferencex.runtime.server.websocket.closing import CloseCode, Closing

MAX_ID_LENGTH = 128
_LARGE = 1 << 18  # characters, from which looking at a frame would hold others up
TYPES = ("auth", "generate", "chat", "cancel", "ping")


@dataclass(frozen=True)
class Message:
    """What a client says; `id` is None where it gives none."""

    type: str
    id: str | None
    fields: Mapping[str, Any]

    @property
    def generation_id(self) -> str:
        """The id of the generation that the message is about. Raises InvalidRequest when it names none."""
        if self.id is None:
            raise InvalidRequest(f"the message {self.type!r} has no id; give one of your choice", param="id")
        return self.id


async def decode(event: Mapping[str, Any], max_bytes: int, max_depth: int) -> Any:
    """Return the JSON of a `websocket.receive` event.

    Raises Closing for what ends the session, and InvalidRequest for JSON that is no message, whatever it says.
    """
    text = event.get("text")
    if text is None:
        raise Closing(CloseCode.UNSUPPORTED, "frames have to be text")
    if len(text) > max_bytes:
        raise Closing(CloseCode.TOO_BIG, f"a frame may have {max_bytes} bytes")
    if len(text) < _LARGE:
        return _decode(text, max_bytes, max_depth)
    return await asyncio.to_thread(_decode, text, max_bytes, max_depth)


def _decode(text: str, max_bytes: int, max_depth: int) -> Any:
    data = text.encode("utf-8")
    if len(data) > max_bytes:
        raise Closing(CloseCode.TOO_BIG, f"a frame may have {max_bytes} bytes")
    check_json(data, max_depth)
    try:
        return from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise Closing(CloseCode.INVALID, f"the frame is not JSON: {error}") from error


def read_id(value: Any) -> str | None:
    """Return the id that a message gives, if it can be one."""
    found = value.get("id") if isinstance(value, Mapping) else None
    return found if isinstance(found, str) and 0 < len(found) <= MAX_ID_LENGTH else None


def read_message(value: Any) -> Message:
    """Return a decoded frame as a message. Raises InvalidRequest for what is none."""
    if not isinstance(value, Mapping):
        raise InvalidRequest("a message is a JSON object with a type")
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in TYPES:
        raise InvalidRequest(f"type is {kind!r:.60}; expected one of {', '.join(TYPES)}", param="type")
    message_id = read_id(value)
    if message_id is None and value.get("id") is not None:
        raise InvalidRequest(
            f"id is {value.get('id')!r:.60}; expected a string of 1 to {MAX_ID_LENGTH} characters", param="id"
        )
    return Message(kind, message_id, {name: field for name, field in value.items() if name not in ("type", "id")})

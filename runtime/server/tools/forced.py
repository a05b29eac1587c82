"""Calls that the request demands: a grammar leaves the model nothing else to write than a JSON array of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from inferencex.runtime.server.tools.base import Opening, ToolParser
from inferencex.runtime.server.tools.call_list import CallList
from inferencex.runtime.server.tools.call_object import CallObject

MAX_CALLS = 16  # so that a model that cannot stop is stopped

_OPEN_ENDED = (
    "additionalProperties",
    "allOf",
    "anyOf",
    "oneOf",
    "patternProperties",
    "unevaluatedProperties",
    "$ref",
)  # keys that say more of an object's properties than `properties` does


class ForcedParser(ToolParser):
    """Reads `[{"name": ..., "arguments": {...}}, ...]`, whatever the model's own way is."""

    def __init__(self, functions: Collection[str]) -> None:
        super().__init__(functions)
        self._list = CallList()
        self._begun = False

    def _look(self, text: str, final: bool) -> Opening | int:
        if self._list.is_open:
            found = self._list.next(text, self.functions, final)
            return len(text) if found is None else found
        stripped = text.lstrip()
        if self._begun or (stripped and not stripped.startswith("[")):
            self._begun = True
            return len(text)
        if not stripped:
            return len(text) if final else 0
        self._begun = True
        self._list.open()
        return Opening(0, len(text) - len(stripped) + 1, CallObject(self.functions))

    def _refused(self) -> None:
        self._list.close()


def schema(tools: Sequence[Mapping[str, Any]], parallel: bool) -> dict[str, Any]:
    """Return the JSON schema of what the model must write.

    tools:    functions that it must choose from, each with `name` and perhaps `parameters`
    parallel: whether there may be more than one call
    """
    calls = []
    definitions = {}
    for place, tool in enumerate(tools):
        name = f"arguments{place}"
        definitions[name] = relocated(_arguments(tool.get("parameters") or {}), f"#/$defs/{name}")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool["name"]}, "arguments": {"$ref": f"#/$defs/{name}"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {
        "type": "array",
        "items": items,
        "minItems": 1,
        "maxItems": MAX_CALLS if parallel else 1,
        "$defs": definitions,
    }


def _arguments(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a call's arguments: an object, with only the declared ones unless it says otherwise."""
    closed = {} if any(key in parameters for key in _OPEN_ENDED) else {"additionalProperties": False}
    return {"type": "object", "properties": {}, **parameters, **closed}


def either(answer: Mapping[str, Any], calls: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of an answer that is one thing or the other."""
    return {"anyOf": [relocated(answer, "#/anyOf/0"), relocated(calls, "#/anyOf/1")]}


def relocated(part: Any, pointer: str) -> Any:
    """Return a schema as it must be written at another place: its references to itself begin with `pointer`."""
    if isinstance(part, Mapping):
        return {
            key: pointer + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else relocated(value, pointer)
            for key, value in part.items()
        }
    return [relocated(item, pointer) for item in part] if isinstance(part, list) else part

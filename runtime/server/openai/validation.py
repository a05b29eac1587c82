"""What is wrong with a request's body, in one sentence, and the name of the field that is meant instead."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from inferencex.runtime.server.errors import InvalidRequest

_OTHER_NAMES = {
    "functions": "tools",
    "function_call": "tool_choice",
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "num_return_sequences": "n",
    "stop_sequences": "stop",
    "typical_p": "top_p",
}
_SHOWN = 60  # characters of a value


def invalid_request(errors: Sequence[Mapping[str, Any]], model: Any) -> InvalidRequest:
    """Return what a client is told of the first field that is wrong, given pydantic's errors and the body's model."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    # A field that takes several forms has an error for each. The form that fits furthest is what was meant; a name
    # that is not known may be the cause of another one that is missing.
    unknown = [error for error in errors if error["type"] == "extra_forbidden"]
    first = max(unknown or [error for error in errors if error["loc"][:2] == first["loc"][:2]], key=_depth)
    place = _path(first)
    if not place:
        return InvalidRequest(
            "the body is missing or no JSON object; send a JSON object with the header Content-Type: application/json"
            if first["type"] == "missing" or isinstance(first.get("input"), bytes)
            else "the body is not a JSON object"
        )
    param = ".".join(str(part)[:_SHOWN] for part in place)
    if first["type"] == "missing":
        return InvalidRequest(f"the field {param!r} is missing", param=param, code="missing_required_parameter")
    if first["type"] == "extra_forbidden":
        return InvalidRequest(_unknown(place, model), param=param, code="unknown_parameter")
    same = dict.fromkeys(_said(error) for error in errors if _path(error) == place)
    found = _shown(first.get("input"))
    code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    return InvalidRequest(f"{param} is {found}; expected {' or '.join(same)}", param=param, code=code)


def _path(error: Mapping[str, Any]) -> list[str | int]:
    """Return where an error is, without the labels by which pydantic tells the forms of a field apart."""
    location: Sequence[str | int] = error["loc"][1:]
    if error["type"] not in ("extra_forbidden", "missing"):
        return [part for part in location if not _is_label(part)]
    return [*(part for part in location[:-1] if not _is_label(part)), *location[-1:]]


def _is_label(part: str | int) -> bool:
    if isinstance(part, int):
        return False
    return part in ("str", "int", "float", "bool", "dict", "list") or "[" in part or "-" in part or part[:1].isupper()


def _depth(error: Mapping[str, Any]) -> tuple[int, list[int]]:
    """Return how far into the body an error is."""
    place = _path(error)
    return len(place), [part for part in place if isinstance(part, int)]


def _unknown(place: Sequence[str | int], model: Any) -> str:
    name = str(place[-1])[:_SHOWN]
    known = sorted({field for owner in _models(model, place[:-1]) for field in _names(owner)})
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    meant = _OTHER_NAMES.get(name) if _OTHER_NAMES.get(name) in known else close[0] if close else None
    where = f" in {'.'.join(map(str, place[:-1]))}" if len(place) > 1 else ""
    hint = f"did you mean {meant!r}?" if meant is not None else "remove it"
    return f"unknown field {name!r}{where}; {hint}"


def _models(annotation: Any, place: Sequence[str | int]) -> Iterator[type[BaseModel]]:
    """Yield the models that a place in the body may be an instance of."""
    for owner in _inside(annotation):
        if not place:
            yield owner
        elif isinstance(place[0], int):
            yield from _models(owner, place[1:])
        else:
            for name, field in owner.model_fields.items():
                if place[0] in (name, field.alias):
                    rest = place[1:]
                    while rest and isinstance(rest[0], int):
                        rest = rest[1:]
                    yield from _models(field.annotation, rest)


def _inside(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _inside(part)


def _names(owner: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in owner.model_fields.items()]


def _said(error: Mapping[str, Any]) -> str:
    message = str(error["msg"])
    for prefix in ("Input should be ", "Value error, "):
        message = message.removeprefix(prefix)
    return message[:1].lower() + message[1:]


def _shown(value: Any) -> str:
    """Return a value as its client wrote it, or what it is where that may be long."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    text = json.dumps(value[:_SHOWN] if isinstance(value, str) else value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"

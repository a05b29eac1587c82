"""The forms in which prompts and conversations are given, one or several, and what is said for all or for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from inferencex.formats.errors import RequestError

Prompt: TypeAlias = str | Sequence[int]
"""A text, or token ids."""

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A conversation, as chat templates take it."""


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts, also for one alone. Raises RequestError for what is neither text nor token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Iterable):
        raise RequestError(f"the prompt is {prompts!r:.60}; expected a text, a list of token ids, or a list of these")
    listed: list[Any] = list(prompts)
    if listed and all(isinstance(item, int) for item in listed):
        return [listed]
    for place, item in enumerate(listed):
        if not isinstance(item, str) and not (
            isinstance(item, Sequence)
            and not isinstance(item, bytes | bytearray)
            and all(isinstance(token_id, int) for token_id in item)
        ):
            raise RequestError(f"prompt {place} is {item!r:.60}; expected a text or a list of token ids")
    return listed


def list_conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """Return a list of conversations, also for one alone, which may be empty."""
    listed: list[Any] = list(messages)
    if not listed or isinstance(listed[0], Mapping):
        return [listed]
    return listed


def one_each(name: str, values: Any, count: int) -> list[Any]:
    """Return a value for each of `count` prompts, of a list of them or of one for all. Raises RequestError."""
    if not isinstance(values, Sequence):
        return [values] * count
    if len(values) != count:
        raise RequestError(f"{len(values)} {name} for {count} prompts; give one for all or one for each")
    return list(values)

"""Prompts in files: JSON Lines, a JSON list as conversations are often shared, or a text to cut prompts from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferencex.formats.errors import OptionError
from inferencex.runtime.load_test.api import Content, Endpoint

_HUMAN = ("human", "user")
EXPECTED = '"prompt" (a text or token ids), "messages", or "conversations" that begin with a human turn'


@dataclass(frozen=True)
class FilePrompt:
    """A prompt of a file; `max_tokens` is None where its record states none."""

    content: Content
    max_tokens: int | None = None


def is_text(path: Path) -> bool:
    """Whether a file is one text rather than records."""
    return path.suffix.lower() not in (".json", ".jsonl", ".ndjson")


def read_text(path: Path) -> str:
    """Return a text; OptionError when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--prompts {path}: cannot be read ({error})") from error


def read_prompts(path: Path, endpoint: Endpoint) -> list[FilePrompt]:
    """Return the prompts of a file of records, in order.

    Raises OptionError, naming the record, for one that is no prompt, or none for this endpoint.
    """
    prompts = [_prompt(where, record, endpoint) for where, record in _records(path)]
    if not prompts:
        raise OptionError(f"--prompts {path}: has no records; expected objects with {EXPECTED}")
    return prompts


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    text = read_text(path)
    if path.suffix.lower() == ".json":
        try:
            records = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise OptionError(f"--prompts {path}: is not JSON ({error})") from error
        if not isinstance(records, list):
            raise OptionError(f"--prompts {path}: is a JSON {type(records).__name__}, expected a list of objects")
        for number, record in enumerate(records, start=1):
            yield f"--prompts {path}, record {number}", record
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"--prompts {path}, line {number}"
            try:
                yield where, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise OptionError(f"{where}: is not JSON ({error})") from error


def _prompt(where: str, record: Any, endpoint: Endpoint) -> FilePrompt:
    if not isinstance(record, dict):
        raise OptionError(f"{where}: is a JSON {type(record).__name__}, expected an object with {EXPECTED}")
    limit = record.get("max_tokens")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise OptionError(f'{where}: "max_tokens" is {limit!r}, expected a whole number above 0')
    content = _content(record)
    if content is None:
        raise OptionError(f"{where}: has no prompt; expected {EXPECTED}")
    if not isinstance(content, str):
        of_ids = isinstance(content[0], int)
        if of_ids and endpoint == "chat":
            raise OptionError(f"{where}: has token ids, which a chat does not take; give --endpoint completions")
        if not of_ids and endpoint == "completions":
            raise OptionError(f'{where}: has "messages"; give --endpoint chat')
    return FilePrompt(content, limit)


def _content(record: dict[str, Any]) -> Content | None:
    prompt, messages, turns = record.get("prompt"), record.get("messages"), record.get("conversations")
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        return messages
    if isinstance(turns, list) and turns and isinstance(turns[0], dict):
        first = turns[0]
        text = first.get("value", first.get("content"))
        if first.get("from", first.get("role")) in _HUMAN and isinstance(text, str) and text:
            return text
    return None

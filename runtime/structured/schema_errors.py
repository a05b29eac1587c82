"""What is wrong with a grammar, and where, in words for whoever wrote it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from inferencex.runtime.structured.grammar import Grammar

Refusal: TypeAlias = Callable[[Mapping[str, Any]], str]
"""Compiles a schema on trial: returns the message it is refused with, "" when it is not."""

_MOST_TRIALS = 200  # of parts of a schema, to find the one to blame: a schema may be huge
_MOST_SECONDS = 1.0
_LONGEST = 300  # characters of a message

# Keywords of JSON schemas whose values are schemas, lists of them, or mappings from names to them.
_ONE = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
_LIST = ("prefixItems", "anyOf", "oneOf", "allOf")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SHARED = ("$defs", "definitions")  # what `$ref` leads to

_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*\])")
_REGEX = re.compile(r"regex parse error:\n(?P<indent> *)(?P<text>.*)\n(?P<caret> *)\^+.*\nerror: (?P<why>[^\n]*)")
_LISTING = re.compile(r"\n +\d+ \| ")  # the lines of the grammar, which the message ends with


_NAMES = {"regex": "regular expression", "lark": "grammar", "choice": "choice"}


def in_words(grammar: Grammar, message: str, refusal: Refusal) -> str:
    """Return the text of the error for a grammar that llguidance refuses with `message`."""
    if grammar.kind not in ("json_schema", "json_object"):
        return f"the {_NAMES[grammar.kind]} cannot be followed: {_explained(message)}"
    schema = grammar.schema
    place = _place(schema, message, refusal) if isinstance(schema, dict) else "#"
    return f"the JSON schema cannot be followed: at {place}: {_explained(message)}"


def _explained(message: str) -> str:
    keys = _UNIMPLEMENTED.search(message)
    if keys is not None:
        names = ", ".join(json.loads(keys[1]))
        return f"not supported here: {names}; leave it out and check the output, or say it in another way"
    if message.startswith("oneOf constraints"):
        return "not supported here: oneOf with alternatives that may overlap; use anyOf"
    expression = _REGEX.search(message)
    if expression is not None:
        position = len(expression["caret"]) - len(expression["indent"])
        return f"the regular expression {expression['text']!r:.100}, at character {position}: {expression['why']}"
    text = _LISTING.split(message, maxsplit=1)[0]
    return " ".join(text.split())[:_LONGEST]


def _place(schema: Mapping[str, Any], message: str, refusal: Refusal) -> str:
    """Return a JSON pointer to the smallest part of a schema that is refused with the same message."""
    shared = {key: schema[key] for key in _SHARED if key in schema}
    place, part, trials, began = "#", schema, 0, time.monotonic()
    while True:
        for inner_place, inner in _parts(place, part, shared):
            trials += 1
            if trials > _MOST_TRIALS or time.monotonic() - began > _MOST_SECONDS:
                return place
            if refusal({**shared, **inner}) == message:
                place, part = inner_place, inner
                break
        else:
            return place


def _parts(place: str, schema: Mapping[str, Any], shared: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the schemas right inside the one at `place`, and the one it refers to, with their places."""
    for key, value in schema.items():
        if key in _ONE and isinstance(value, dict):
            yield f"{place}/{key}", value
        elif key in _LIST and isinstance(value, list):
            yield from ((f"{place}/{key}/{i}", inner) for i, inner in enumerate(value) if isinstance(inner, dict))
        elif key in _NAMED and isinstance(value, dict):
            for name, inner in value.items():
                if isinstance(inner, dict):
                    yield f"{place}/{key}/{name.replace('~', '~0').replace('/', '~1')}", inner
        elif key == "$ref" and isinstance(value, str) and value.count("/") == 2:
            _, kind, name = value.split("/")
            inner = shared[kind].get(name) if isinstance(shared.get(kind), dict) else None
            if isinstance(inner, dict):
                yield value, inner

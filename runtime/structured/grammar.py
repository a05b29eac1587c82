"""What an output has to look like, as a request states it: a value without any of the machinery behind it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, TypeAlias, get_args

from inferencex.formats.errors import RequestError
from inferencex.formats.records import record

GrammarKind = Literal["json_object", "json_schema", "regex", "lark", "choice"]
KINDS: tuple[GrammarKind, ...] = get_args(GrammarKind)

JsonSchema: TypeAlias = Mapping[str, Any] | bool

WHITESPACE = r"[ ]|\n[ \t]{0,20}"
"""What may stand between the parts of a JSON text: a space, or a new line and its indentation, never more than that.

Without a bound a small model may go on with spaces for as long as it is let.
"""

_NEEDS_TEXT = "needs a text; {found!r:.60} was given"


@record(frozen=True)
class Grammar:
    """What an output has to look like. Equal grammars are equal values, and are compiled once.

    The methods named after the kinds make them; they raise RequestError for what cannot be one.

    kind: "json_object", "json_schema", "regex" (the whole output matches it), "lark" or "choice"
    text: the schema as JSON, the expression, the grammar in Lark's syntax, or the list of choices as JSON
    """

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RequestError(f"the grammar's kind is {self.kind!r:.60}; expected one of: {', '.join(KINDS)}")
        if not isinstance(self.text, str):
            raise RequestError(f"a grammar of kind {self.kind!r} {_NEEDS_TEXT.format(found=self.text)}")
        if self.kind != "json_object" and not self.text:
            raise RequestError(f"a grammar of kind {self.kind!r} needs a text, and it is empty")

    @property
    def schema(self) -> JsonSchema:
        """The JSON schema of a grammar of kind "json_schema" or "json_object". Raises RequestError for others."""
        if self.kind == "json_object":
            return {"type": "object"}
        if self.kind != "json_schema":
            raise RequestError(f"a grammar of kind {self.kind!r} is no JSON schema")
        try:
            schema = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the JSON schema is no JSON: {error}") from error
        if not isinstance(schema, Mapping | bool):
            raise RequestError(f"the JSON schema is {schema!r:.60}; expected an object")
        return schema

    @classmethod
    def json_object(cls) -> Self:
        """Return the grammar of any JSON object."""
        return cls("json_object")

    @classmethod
    def json_schema(cls, schema: JsonSchema | str) -> Self:
        """Return the grammar of the JSON texts that a schema describes; the order of its properties is theirs, too."""
        if isinstance(schema, str):
            grammar = cls("json_schema", schema)
            return cls("json_schema", _dumped(grammar.schema, "the JSON schema"))
        if not isinstance(schema, Mapping | bool):
            raise RequestError(f"the JSON schema is {schema!r:.60}; expected an object")
        return cls("json_schema", _dumped(schema, "the JSON schema"))

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Return the grammar of the texts that a regular expression matches from beginning to end."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str) -> Self:
        """Return a context-free grammar in Lark's syntax, whose rule `start` is the output.

        A rule may be a JSON schema: `%json {...}` (`embedded_json` writes it).
        """
        return cls("lark", grammar)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Self:
        """Return the grammar of a choice between texts."""
        if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
            raise RequestError(f"the choices are {choices!r:.60}; expected a list of texts")
        for choice in choices:
            if not isinstance(choice, str) or not choice:
                raise RequestError(f"one of the choices is {choice!r:.60}; expected a text that is not empty")
        return cls("choice", _dumped(list(choices), "the list of choices"))


def embedded_json(schema: JsonSchema) -> str:
    """Return a JSON schema as part of a rule of a Lark grammar, with whitespace bounded as it is elsewhere."""
    return "%json " + _dumped(with_bounded_whitespace(schema), "the JSON schema")


def with_bounded_whitespace(schema: JsonSchema) -> Mapping[str, Any]:
    """Return a schema whose `x-guidance`, llguidance's own keyword, bounds whitespace; what it says itself counts."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    guidance = schema.get("x-guidance", {})
    if not isinstance(guidance, Mapping) or "whitespace_pattern" in guidance or "whitespace_flexible" in guidance:
        return schema
    return {**schema, "x-guidance": {**guidance, "whitespace_pattern": WHITESPACE}}


def _dumped(value: object, what: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{what} cannot be written as JSON: {error}") from error

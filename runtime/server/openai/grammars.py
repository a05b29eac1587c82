"""Which form an answer must have, from the several fields that can say so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from inferencex.formats.errors import RequestError
from inferencex.runtime.server.errors import InvalidRequest, invalid
from inferencex.runtime.server.openai.protocol.chat import Tool
from inferencex.runtime.server.openai.protocol.sampling import ResponseFormat, SamplingFields
from inferencex.runtime.server.tools import forced
from inferencex.runtime.structured import Grammar


def requested_grammar(body: SamplingFields) -> Grammar | None:
    """Return the constraint of a request, None without any. Raises InvalidRequest for more than one."""
    found: dict[str, Grammar] = {}
    if body.response_format is not None:
        grammar = _response_format(body.response_format)
        if grammar is not None:
            found["response_format"] = grammar
    outputs = body.structured_outputs
    for field, kind, value in (
        ("guided_json", "json_schema", body.guided_json),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice),
        ("guided_grammar", "lark", body.guided_grammar),
        ("structured_outputs.json", "json_schema", outputs and outputs.json_),
        ("structured_outputs.regex", "regex", outputs and outputs.regex),
        ("structured_outputs.choice", "choice", outputs and outputs.choice),
        ("structured_outputs.grammar", "lark", outputs and outputs.grammar),
        ("structured_outputs.json_object", "json_object", (outputs and outputs.json_object) or None),
    ):
        if value is not None:
            found[field] = _grammar(field, kind, value)
    if len(found) > 1:
        both = " and ".join(list(found)[:2])
        raise InvalidRequest(f"{both} both say what form the answer has; give one of them", param=list(found)[1])
    return next(iter(found.values()), None)


def calls_grammar(tools: Sequence[Tool], parallel: bool, answer: Grammar | None) -> Grammar:
    """Return the constraint of an answer that is calls of these tools, or else has the form of `answer`.

    Raises InvalidRequest for a form that calls cannot be an alternative to.
    """
    functions: list[dict[str, Any]] = [tool.function.model_dump(exclude_none=True) for tool in tools]
    calls = forced.schema(functions, parallel)
    if answer is None:
        return _grammar("tools", "json_schema", calls)
    if answer.kind == "json_object":
        return _grammar("tools", "json_schema", forced.either({"type": "object"}, calls))
    if answer.kind == "json_schema":
        return _grammar("tools", "json_schema", forced.either(json.loads(answer.text), calls))
    raise InvalidRequest(
        f"an answer of the form {answer.kind!r} cannot also be a call; set tool_choice to 'none', or use a JSON schema",
        param="tools",
    )


def _response_format(wanted: ResponseFormat) -> Grammar | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar.json_object()
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise InvalidRequest(
            "response_format of type json_schema needs json_schema.schema",
            param="response_format.json_schema.schema",
            code="missing_required_parameter",
        )
    return _grammar("response_format", "json_schema", wanted.json_schema.schema_)


def _grammar(field: str, kind: str, value: Any) -> Grammar:
    """Return a grammar. Raises InvalidRequest that blames `field` when there can be no such one."""
    try:
        if kind == "json_schema":
            return Grammar.json_schema(value)
        if kind == "regex":
            return Grammar.regex(value)
        if kind == "choice":
            return Grammar.choice(value)
        return Grammar.json_object() if kind == "json_object" else Grammar.lark(value)
    except RequestError as error:
        raise invalid(error, field) from error

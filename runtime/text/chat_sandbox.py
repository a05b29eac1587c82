"""The sandbox that chat templates run in: Jinja, as `transformers` sets it up, less what leads out of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template can do wrong at run time: its own errors, and Python's from the values it handles."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; in inference its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Any) -> str:
        return str(caller())


class _GuardedNamespace(Namespace):
    """Jinja's `namespace` without names that start with an underscore: they lead into Python's internals."""

    def __init__(*args: Any, **attributes: Any) -> None:  # `self` may be one of the attributes
        self, *rest = args
        values = dict(*rest, **attributes)
        for name in values:
            _refuse_underscore(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace attribute may not start with an underscore: {name!r}")


class _GuardedDict:
    """What `dict` is inside templates: callable, and nothing else of the type."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` filter without the escapes for HTML that Jinja's own adds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def sandbox(now: Callable[[], datetime] = datetime.now) -> ImmutableSandboxedEnvironment:
    """Return a new environment with the filters and functions that templates count on; `now` is their clock."""

    def strftime_now(pattern: str) -> str:
        return now().strftime(pattern)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        {
            "raise_exception": _raise_exception,
            "strftime_now": strftime_now,
            "dict": _GuardedDict(),
            "namespace": _GuardedNamespace,
        }
    )
    return environment

"""Commands that start at once: option values that need no conversion go past Typer's, which imports pydantic for it.

Typer checks every value with a validator of pydantic, also values that are absent or text already. Importing pydantic
and building those validators takes longer than reading the weights of a small model. A value is let through here only
if Typer's own answer for it is certain; everything else, and every error, stays Typer's.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

from typer.core import TyperCommand

_INTEGER: Final = re.compile(r"-?[0-9]{1,18}", re.ASCII)
_UNDECIDED: Final = object()


class PromptCommand(TyperCommand):
    """A command of Typer that converts by itself what is plain; give it as `@app.command(cls=PromptCommand)`."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, the help option with them, each of which takes plain values as they are."""
        parameters = super().get_params(ctx)
        for parameter in parameters:
            _let_plain_values_through(parameter)
        return parameters


def plain_value(value: Any, annotation: Any, constraints: Any) -> Any:
    """Return the value as the annotated type if that is beyond doubt, else a mark that `is_undecided` knows.

    constraints: Typer's description of the option, with the limits of numbers and the demands on paths
    """
    kind, origin = type(value), get_origin(annotation)
    if constraints.parser is not None:
        return _UNDECIDED
    if origin is list and get_args(annotation) == (str,) and kind in (list, tuple):
        return list(value) if all(type(text) is str for text in value) else _UNDECIDED
    if origin is Literal:
        return value if kind is str and value in get_args(annotation) else _UNDECIDED
    if annotation in (bool, str) and kind is annotation:
        return value
    if annotation is int and constraints.min is None and constraints.max is None:
        whole = kind is int or (kind is str and _INTEGER.fullmatch(value))
        return int(value) if whole else _UNDECIDED
    if annotation is Path and kind is str and _is_plain_path(constraints):
        path = Path(value)
        return path if os.access(path, os.R_OK) or not os.path.lexists(path) else _UNDECIDED
    return _UNDECIDED


def _is_plain_path(constraints: Any) -> bool:
    """Whether all that is asked of a path is that it can be read if it is there, as Typer always asks."""
    demands = (constraints.exists, constraints.writable, constraints.resolve_path, constraints.allow_dash)
    takes_all = constraints.file_okay and constraints.dir_okay and constraints.path_type is None
    return bool(takes_all and constraints.readable and not any(demands))


def is_undecided(value: Any) -> bool:
    """Whether `plain_value` left the value to Typer."""
    return value is _UNDECIDED


def _let_plain_values_through(parameter: Any) -> None:
    descriptor = getattr(parameter, "type_descriptor", None)
    if descriptor is None or "process_value" in vars(parameter):
        return
    annotation, constraints, process = descriptor.annotation, descriptor.parameter_info, parameter.process_value
    several = parameter.multiple or parameter.nargs == -1

    def processed(context: Any, value: Any) -> Any:
        if value is None and not parameter.required:
            plain = () if several else None
        else:
            plain = plain_value(value, annotation, constraints)
        if is_undecided(plain):
            return process(context, value)
        return plain if parameter.callback is None else parameter.callback(context, parameter, plain)

    parameter.process_value = processed

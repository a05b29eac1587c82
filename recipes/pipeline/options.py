"""Options of our own commands as recipes state them: checked against the commands themselves, made into arguments."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from functools import cache
from importlib import import_module
from typing import Any

import typer

from inferencex.formats.errors import RecipeError

_NEVER = ("debug", "help")


@cache
def command_options(module: str) -> Mapping[str, Any]:
    """Return the options of the command whose `app` is in `module`, by their long names without dashes."""
    command = typer.main.get_command(import_module(module).app)
    options: dict[str, Any] = {}
    for parameter in command.params:
        for name in parameter.opts:
            if name.startswith("--"):
                options[name[2:]] = parameter
    return options


def option_type(option: Any) -> Any:
    """Return the type of an option's value."""
    return option.type_descriptor.annotation


def arguments(module: str, given: Mapping[str, Any], *, refused: Collection[str] = ()) -> list[str]:
    """Return the arguments that say what a recipe states, in the order of the names.

    Raises RecipeError, beginning with the option's name, for one that the command does not have, a value it does not
    take, or one of those `refused`, which the pipeline gives itself.
    """
    known = command_options(module)
    taken = {*refused, *_NEVER}
    result: list[str] = []
    for written in sorted(given):
        name, value = written.replace("_", "-"), given[written]
        if name in refused:
            raise RecipeError(f"{written}: the pipeline sets this option itself; leave it out")
        if name not in known or name in _NEVER:
            near = difflib.get_close_matches(name, [option for option in known if option not in taken], 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(set(known) - taken))}"
            raise RecipeError(f"{written}: there is no such option; {hint}")
        result += _argument(written, name, value, known[name])
    return result


def _argument(written: str, name: str, value: Any, option: Any) -> list[str]:
    if option.is_flag:
        if not isinstance(value, bool):
            raise RecipeError(f"{written}: is {value!r}, expected true or false")
        return [f"--{name}"] if value else option.secondary_opts[:1]
    if isinstance(value, bool):
        raise RecipeError(f"{written}: is {str(value).lower()}, expected a value")
    values = value if isinstance(value, list) else [value]
    if len(values) != 1 and not option.multiple:
        raise RecipeError(f"{written}: is a list, expected one value")
    for each in values:
        kind = option_type(option)
        if kind in (int, float):
            try:
                kind(str(each))
            except ValueError as error:
                expected = "a whole number" if kind is int else "a number"
                raise RecipeError(f"{written}: is {each!r}, expected {expected}") from error
    return [f"--{name}={each}" for each in values]

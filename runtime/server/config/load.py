"""Layers become settings: flags go before variables, those before the file, and that before the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from inferencex.formats.errors import OptionError
from inferencex.runtime.server.config.catalogue import Key, Kind, by_path
from inferencex.runtime.server.config.keys_setting import ApiKey
from inferencex.runtime.server.config.layers import (
    CONFIG_VARIABLE,
    Given,
    Layer,
    read_file,
    read_flags,
    read_variables,
    suggest,
)
from inferencex.runtime.server.config.settings import Settings

_BOUNDS = {
    "greater_than": "above {gt}",
    "greater_than_equal": "of at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "of at most {le}",
}


@dataclass(frozen=True)
class Resolved:
    """Settings, and where each came from that is not a default."""

    settings: Settings
    origins: Mapping[str, str]


def load_settings(flags: Mapping[str, Any], environ: Mapping[str, str], config: Path | None = None) -> Resolved:
    """Return the settings of a server.

    flags:   values by the place of their key (`server.port`); None for those that were not given
    environ: environment variables
    config:  the YAML file; without one, that which `INFERENCEX_CONFIG` names, if any

    Raises OptionError that says where the value that is wrong came from, what it is, and what was expected.
    """
    if config is None and environ.get(CONFIG_VARIABLE):
        config = Path(environ[CONFIG_VARIABLE])
    layers = [read_variables(environ), read_flags(flags)]
    if config is not None:
        layers.insert(0, read_file(config))
    given: dict[str, Given] = {}
    for layer in layers:
        given.update(layer)
    return Resolved(_validated(given), {path: item.origin for path, item in given.items()})


def _validated(given: Layer) -> Settings:
    values: dict[str, dict[str, Any]] = {}
    for path, item in given.items():
        section, _, name = path.partition(".")
        values.setdefault(section, {})[name] = item.value
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        problems = dict.fromkeys(_describe(detail, given) for detail in error.errors(include_url=False))
        raise OptionError("; ".join(problems)) from None  # the original may show keys


def _describe(detail: ErrorDetails, given: Layer) -> str:
    """Say what is wrong with a value: where it was given, what it is, and what was expected."""
    place, rest = ".".join(map(str, detail["loc"][:2])), detail["loc"][2:]
    reason = str(detail["ctx"]["error"]) if detail["type"] == "value_error" else detail["msg"]
    key = by_path().get(place)
    if key is None:  # of a section as a whole: values that do not go together
        return f"{place}: {reason}" if place else reason
    item = given[place]
    if key.kind is Kind.KEY:
        where = f"{item.origin_of(rest)}: {place}" + "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest
        )
        if detail["type"] == "extra_forbidden":
            names = list(ApiKey.model_fields)
            return f"{where} is unknown{suggest(str(rest[-1]), names) or '; there are ' + ', '.join(names)}"
        return f"{where}: {reason[:1].lower()}{reason[1:]}"
    where = item.origin_of(rest)
    if where != key.flag:
        where += f": {place}"
    value = item.value
    if rest and isinstance(value, list | tuple) and isinstance(rest[0], int):
        value = value[rest[0]]
    return f"{where} is {value!r:.60}, {_expected(detail, key, reason)}"


def _expected(detail: ErrorDetails, key: Key, reason: str) -> str:
    bound = _BOUNDS.get(detail["type"])
    if bound is not None:
        return f"expected {key.kind.value} {bound.format(**detail['ctx'])}"
    if detail["type"] == "value_error":
        return reason
    return f"expected {key.expected}"

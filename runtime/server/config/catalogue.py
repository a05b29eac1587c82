"""The list of all keys, read off the settings: what each is called in the file, as a variable and as a flag."""

from __future__ import annotations

import enum
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from inferencex.runtime.server.config.flags import Flag
from inferencex.runtime.server.config.keys_setting import ApiKey
from inferencex.runtime.server.config.settings import Settings
from inferencex.runtime.server.config.sizes import SizeUnit, show_size

PREFIX = "INFERENCEX_"
DELIMITER = "__"


class Kind(enum.Enum):
    """What a value is, in the words of an error message."""

    SWITCH = "true or false"
    INTEGER = "an integer"
    NUMBER = "a number"
    SIZE = "a size such as 4GiB"
    PATH = "a path"
    TEXT = "a text"
    KEY = "a key, or an object with 'key' and limits"


@dataclass(frozen=True)
class Key:
    """One setting. `choices` are the only values it takes; `repeated` ones are lists."""

    section: str
    name: str
    flag: str
    kind: Kind
    choices: tuple[str, ...]
    repeated: bool
    optional: bool
    default: Any
    help: str

    @property
    def path(self) -> str:
        """Its place in the file, such as `server.port`."""
        return f"{self.section}.{self.name}"

    @property
    def variable(self) -> str:
        """The environment variable that sets it, such as `INFERENCEX_SERVER__PORT`."""
        return f"{PREFIX}{self.section}{DELIMITER}{self.name}".upper()

    @property
    def off_flag(self) -> str | None:
        """The flag that turns a switch off."""
        return f"--no-{self.flag.removeprefix('--')}" if self.kind is Kind.SWITCH else None

    @property
    def expected(self) -> str:
        """What its value has to be."""
        one = f"one of {', '.join(self.choices)}" if self.choices else self.kind.value
        return f"{one}, or a list of such" if self.repeated else one

    @property
    def shown_default(self) -> str:
        """The default as one would write it; empty where there is none."""
        if self.default is None or self.default == ():
            return ""
        if self.kind is Kind.SIZE:
            return show_size(self.default)
        if self.kind is Kind.SWITCH:
            return str(self.default).lower()
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


@cache
def keys() -> tuple[Key, ...]:
    """Return every key, in the order of the sections."""
    return tuple(_keys())


@cache
def sections() -> tuple[str, ...]:
    """Return the names of the sections."""
    return tuple(Settings.model_fields)


@cache
def by_path() -> dict[str, Key]:
    """Return every key by its place in the file."""
    return {key.path: key for key in keys()}


def _keys() -> Iterator[Key]:
    for section, about in Settings.model_fields.items():
        model = about.annotation
        assert isinstance(model, type) and issubclass(model, BaseModel)
        for name, field in model.model_fields.items():
            flag = next((item.name for item in field.metadata if isinstance(item, Flag)), None)
            kind, choices, repeated = _read(field.annotation, field)
            yield Key(
                section=section,
                name=name,
                flag=flag or f"--{name.replace('_', '-')}",
                kind=kind,
                choices=choices,
                repeated=repeated,
                optional=field.default is None,
                default=field.default,
                help=" ".join((field.description or "").split()),
            )


_KINDS: dict[Any, Kind] = {
    bool: Kind.SWITCH,
    int: Kind.INTEGER,
    float: Kind.NUMBER,
    str: Kind.TEXT,
    Path: Kind.PATH,
    ApiKey: Kind.KEY,
}


def _read(annotation: Any, field: FieldInfo | None = None) -> tuple[Kind, tuple[str, ...], bool]:
    """Return what an annotation's values are: kind, choices, and whether there may be several."""
    metadata = list(field.metadata) if field is not None else []
    while get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        metadata += more
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return _read(next(part for part in get_args(annotation) if part is not types.NoneType))
    if origin is tuple:
        kind, choices, _ = _read(get_args(annotation)[0])
        return kind, choices, True
    if origin is Literal:
        return Kind.TEXT, get_args(annotation), False
    if any(isinstance(item, SizeUnit) for item in metadata):
        return Kind.SIZE, (), False
    return _KINDS[annotation], (), False

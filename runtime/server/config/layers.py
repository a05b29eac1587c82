"""The places a setting comes from: a file, environment variables, flags. Each is read into one flat layer."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from inferencex.formats.errors import OptionError
from inferencex.runtime.server.config.catalogue import DELIMITER, PREFIX, by_path, keys, sections

CONFIG_VARIABLE = f"{PREFIX}CONFIG"
# Variables of this name that other commands and the tests of this project read.
OTHER_VARIABLES = frozenset({CONFIG_VARIABLE, f"{PREFIX}DEBUG", f"{PREFIX}SHARED_DATA", f"{PREFIX}FUZZ_EXAMPLES"})
# Kubernetes tells each pod of every service this way; one may be called inferencex or inferencex-something.
_KUBERNETES = re.compile(
    r"(\w+_)?(SERVICE_HOST=.*|SERVICE_PORT(_\w+)?=\d+|PORT=\w+://.*|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?=.*)"
)

_ALIKE, _SAME_SECTION = 0.65, 0.1  # from where on two names count as alike, and what being in the right section adds


@dataclass(frozen=True)
class Given:
    """A value as it was given. `origin` says where, such as `config.yaml, line 3`, `INFERENCEX_SERVER__PORT`, `--port`.

    lines: for a value with parts, the origin of a part by its path below the value
    """

    value: Any
    origin: str
    lines: Mapping[tuple[str | int, ...], str] = field(default_factory=dict)

    def origin_of(self, path: Sequence[str | int]) -> str:
        """Return where a part of the value was given, as closely as is known."""
        for end in range(len(path), 0, -1):
            found = self.lines.get(tuple(path[:end]))
            if found is not None:
                return found
        return self.origin


Layer = Mapping[str, Given]
"""Values by the place of their key, such as `server.port`."""


def read_flags(flags: Mapping[str, Any]) -> Layer:
    """Return the layer of flags from their values by place; None stands for a flag that was not given."""
    return {path: Given(value, by_path()[path].flag) for path, value in flags.items() if value is not None}


def read_variables(environ: Mapping[str, str]) -> Layer:
    """Return the layer of the variables `INFERENCEX_<SECTION>__<KEY>`; empty ones count as not set.

    Lists are separated by commas, or JSON. Raises OptionError for a variable `INFERENCEX_*` that means nothing.
    """
    known = {key.variable: key for key in keys()}
    layer: dict[str, Given] = {}
    for name, text in sorted(environ.items()):
        if not name.startswith(PREFIX) or name in OTHER_VARIABLES or not text.strip():
            continue
        key = known.get(name)
        if key is not None:
            layer[key.path] = Given(_split(text, name) if key.repeated else text, name)
        elif not _KUBERNETES.fullmatch(f"{name.removeprefix(PREFIX)}={text}"):
            raise OptionError(f"the environment variable {name} sets nothing{_suggest_variable(name, list(known))}")
    return layer


def read_file(path: Path) -> Layer:
    """Return the layer of a YAML file. Raises OptionError naming file and line for what has no place in it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise OptionError(f"--config {path}: {reason}") from error
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        return _File(path, loader).layer(root) if root is not None else {}
    except yaml.MarkedYAMLError as error:
        where = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise OptionError(f"{path}{where}: is not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise OptionError(f"{path}: is not YAML: {error}") from error


class _File:
    """Reads one YAML document node by node, so that errors can name lines."""

    def __init__(self, path: Path, loader: yaml.SafeLoader) -> None:
        self._path = path
        self._loader = loader

    def layer(self, root: yaml.Node) -> dict[str, Given]:
        """Return the values of all sections."""
        layer: dict[str, Given] = {}
        for section, line, node in self._entries(root, f"the sections {', '.join(sections())}"):
            if section not in sections():
                raise OptionError(f"{self._at(line)}: there is no section {section!r}{suggest_key('', section)}")
            if self._is_null(node):
                continue
            for name, name_line, value in self._entries(node, f"the keys of {section}"):
                key = by_path().get(f"{section}.{name}")
                if key is None:
                    raise OptionError(
                        f"{self._at(name_line)}: {section} has no key {name!r}{suggest_key(section, name)}"
                    )
                if self._is_null(value) and key.optional:
                    continue
                layer[key.path] = Given(
                    self._loader.construct_object(value, deep=True),
                    self._at(name_line),
                    dict(self._lines(value, ())),
                )
        return layer

    def _entries(self, node: yaml.Node, expected: str) -> Iterator[tuple[str, int, yaml.Node]]:
        """Yield key, line and value of a mapping; OptionError for anything else, and for a key that is there twice."""
        if not isinstance(node, yaml.MappingNode):
            raise OptionError(f"{self._at(node.start_mark.line)}: expected {expected}, as a mapping")
        seen: set[str] = set()
        for name, value in node.value:
            if name.value in seen:
                raise OptionError(f"{self._at(name.start_mark.line)}: {name.value!r} is there twice")
            seen.add(name.value)
            yield name.value, name.start_mark.line, value

    def _lines(
        self, node: yaml.Node, path: tuple[str | int, ...], depth: int = 0
    ) -> Iterator[tuple[tuple[str | int, ...], str]]:
        if path:
            yield path, self._at(node.start_mark.line)
        if depth >= 3:  # no setting has parts deeper than a list of objects
            return
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                yield from self._lines(item, (*path, index), depth + 1)
        elif isinstance(node, yaml.MappingNode):
            for name, item in node.value:
                yield from self._lines(item, (*path, name.value), depth + 1)

    def _at(self, line: int) -> str:
        return f"{self._path}, line {line + 1}"

    @staticmethod
    def _is_null(node: yaml.Node) -> bool:
        return bool(node.tag == "tag:yaml.org,2002:null")


def suggest(name: str, candidates: Sequence[str]) -> str:
    """Return `; did you mean ...?` with the likeliest of the candidates, or nothing."""
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def suggest_key(section: str, name: str) -> str:
    """Return a hint for an unknown key of a section ("" for the top of the file), or a list of what there is."""
    normal = name.replace("-", "_").lower()
    for key in keys():  # the right key in the wrong place, or called as its flag is
        if normal in (key.name, key.flag.removeprefix("--").replace("-", "_")):
            return f"; did you mean {key.path}?"
    here = [key.name for key in keys() if key.section == section] if section else list(sections())
    elsewhere = {key.name: key.path for key in keys() if key.name not in here}
    likeness = {place: _likeness(normal, place) + _SAME_SECTION for place in here}
    likeness.update((place, _likeness(normal, place)) for place in elsewhere)
    best = max(likeness, key=lambda place: likeness[place])
    if likeness[best] < _ALIKE:
        return f"; there are {', '.join(here)}"
    return f"; did you mean {elsewhere.get(best, best)}?"


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _suggest_variable(name: str, known: Sequence[str]) -> str:
    rest = name.removeprefix(PREFIX)
    for key in keys():
        if rest.lower() in (key.name, f"{key.section}_{key.name}"):
            return f"; did you mean {key.variable}?"
    close = suggest(rest, [variable.removeprefix(PREFIX) for variable in known])
    if close:
        return close.replace("mean ", f"mean {PREFIX}")
    return f"; variables are called {PREFIX}<SECTION>{DELIMITER}<KEY>, such as {PREFIX}SERVER{DELIMITER}PORT"


def _split(text: str, name: str) -> Any:
    """Read a list from a variable: JSON where it looks like that, else texts between commas."""
    if text.lstrip().startswith(("[", "{")):
        try:
            return json.loads(text)
        except ValueError as error:
            raise OptionError(f"{name}: begins like JSON and is not ({error.__class__.__name__})") from error
    return [part.strip() for part in text.split(",") if part.strip()]

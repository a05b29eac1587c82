"""YAML recipes with the line and column of every value, so that what is wrong can be shown where it is written."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from inferencex.formats.errors import OptionError, RecipeError

MAX_SIZE = 1 << 20
MAX_DEPTH = 32
MAX_VALUES = 20_000
_SHOWN_ERRORS = 5
_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")

Place = tuple[str | int, ...]
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class YamlSource:
    """A YAML document and where each of its values is.

    name:      the file, as it was named
    document:  plain data: dicts with text keys, lists, texts, numbers, booleans, None
    places:    "file:line:column" (both from 1), or the option a value came from, by path of keys and indices
    keys:      the same for the keys of mappings, by the path of what they hold
    """

    name: str
    document: Any
    places: Mapping[Place, str]
    keys: Mapping[Place, str]

    def where(self, path: Sequence[str | int], *, key: bool = False) -> str:
        """Return where the value at `path` is, or its key, or else the nearest value around it."""
        known: Place = ()
        for part in path:
            # What validates may name alternatives of a union in between; those are not in the document.
            if (*known, part) in self.places:
                known = (*known, part)
        if key and known in self.keys:
            return self.keys[known]
        return self.places.get(known, self.name)

    def with_values(self, settings: Sequence[str], option: str = "--set") -> YamlSource:
        """Return the document with `key.key=value` put in, each value read as YAML.

        An index or the `name` of an entry chooses from a list. Raises OptionError for what is not of this form, or
        leads through what is not there.
        """
        document, places = copy.deepcopy(self.document), dict(self.places)
        for setting in settings:
            key, separator, text = setting.partition("=")
            if not separator or not key:
                raise OptionError(f"{option} {setting!r} is not of the form key=value, such as source.model=/models/x")
            try:
                value = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise OptionError(f"{option} {setting}: the value is not YAML: {_one_line(error)}") from error
            path = _put(document, key.split("."), value, f"{option} {setting}")
            for old in [p for p in places if p[: len(path)] == path]:
                del places[old]
            places[path] = f"{option} {setting}"
        return YamlSource(self.name, document, places, {p: at for p, at in self.keys.items() if p in places})

    def error(self, path: Sequence[str | int], message: str) -> RecipeError:
        """Return the error that `message` is about the value at `path`."""
        return RecipeError(f"{self.where(path)}: {message}")

    def validate(self, model: type[M]) -> M:
        """Return the document as `model`; raises RecipeError with the place of everything that is wrong."""
        try:
            return model.model_validate(self.document)
        except ValidationError as error:
            raise RecipeError(self._explain(error, model)) from error

    def _explain(self, error: ValidationError, model: type[BaseModel]) -> str:
        found = error.errors(include_url=False, include_context=False)
        lines = []
        for entry in found[:_SHOWN_ERRORS]:
            path, kind = entry["loc"], entry["type"]
            name = ".".join(str(part) for part in path)
            text = entry["msg"].removeprefix("Value error, ")
            if kind == "missing":
                text = f"{name} is missing"
            elif kind == "extra_forbidden":
                text = f"{name} is not known here{self._known(model, path)}"
            elif name:
                text = f"{name} is {_shown(entry['input'])}: {text}"
            lines.append(f"{self.where(path, key=kind in ('missing', 'extra_forbidden'))}: {text}")
        if len(found) > _SHOWN_ERRORS:
            lines.append(f"and {len(found) - _SHOWN_ERRORS} more")
        return "\n".join(lines)

    def _known(self, model: type[BaseModel], path: Sequence[str | int]) -> str:
        """Return the names that are known beside an unknown one, as far as the model's fields show them."""
        if len(path) != 1:
            return ""
        names = [field.alias or name for name, field in model.model_fields.items()]
        return f"; known are {', '.join(names)}"


def read_yaml(path: Path) -> YamlSource:
    """Read one YAML document; raises RecipeError naming file, line and column.

    Anchors may be used, within limits; a key given twice, keys that are not texts, tags of Python objects and several
    documents in a file are refused.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_SIZE:
        raise RecipeError(f"{path}: has {len(data)} bytes, the limit for a recipe is {MAX_SIZE}")
    try:
        return parse_yaml(data.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: is not UTF-8 text: {error}") from error


def parse_yaml(text: str, name: str) -> YamlSource:
    """Read one YAML document from a text; see `read_yaml`."""
    try:
        loader = yaml.SafeLoader(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"{name}: is not YAML: {_one_line(error)}") from error
    try:
        node = loader.get_single_node()
        walk = _Walk(name, loader)
        document = None if node is None else walk.value(node, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = name if mark is None else f"{name}:{mark.line + 1}:{mark.column + 1}"
        problem = " ".join(part for part in (error.context, error.problem) if part)
        raise RecipeError(f"{where}: is not YAML: {problem}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise RecipeError(f"{name}: is not YAML: {_one_line(error)}") from error
    finally:
        loader.dispose()
    walk.places.setdefault((), f"{name}:1:1")
    return YamlSource(name, document, walk.places, walk.keys)


class _Walk:
    """Nodes to plain data, noting where each value is."""

    def __init__(self, name: str, loader: yaml.SafeLoader) -> None:
        self.name, self.loader = name, loader
        self.places: dict[Place, str] = {}
        self.keys: dict[Place, str] = {}

    def value(self, node: yaml.Node, path: Place) -> Any:
        where = f"{self.name}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"
        self.places[path] = where
        if len(path) > MAX_DEPTH or len(self.places) > MAX_VALUES:
            raise RecipeError(f"{where}: nests or repeats too much for a recipe (anchors that contain themselves?)")
        if isinstance(node, yaml.CollectionNode) and node.tag not in _COLLECTIONS:
            raise RecipeError(f"{where}: the tag {_shown(node.tag)} is not for recipes; leave it out")
        if isinstance(node, yaml.MappingNode):
            self.loader.flatten_mapping(node)
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(child, (*path, index)) for index, child in enumerate(node.value)]
        value = self.loader.construct_object(node)
        # Dates and bytes are YAML's own types; recipes know them only as texts.
        return value if value is None or isinstance(value, str | bool | int | float) else node.value

    def _mapping(self, node: yaml.MappingNode, path: Place) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            mark = key_node.start_mark
            where = f"{self.name}:{mark.line + 1}:{mark.column + 1}"
            key = self.loader.construct_object(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                raise RecipeError(f"{where}: the key {_shown(key_node.value)} is not a text; put it in quotes")
            if key in mapping:
                raise RecipeError(f"{where}: {key} is given twice; leave one of them out")
            mapping[key] = self.value(value_node, (*path, key))
            self.keys[(*path, key)] = where
        return mapping


def _put(document: Any, keys: Sequence[str], value: Any, what: str) -> Place:
    """Put a value into a document and return the path it is at."""
    path: Place = ()
    for position, key in enumerate(keys):
        last = position == len(keys) - 1
        part: str | int
        if isinstance(document, dict):
            part = key
            if last:
                document[key] = value
            else:
                document = document.setdefault(key, {})
        elif isinstance(document, list):
            part = _index(document, key, what)
            if last:
                document[part] = value
            else:
                document = document[part]
        else:
            raise OptionError(f"{what}: {'.'.join(keys[:position])} is {_shown(document)}, which has no {key}")
        path = (*path, part)
    return path


def _index(entries: list[Any], key: str, what: str) -> int:
    names = [entry.get("name") for entry in entries if isinstance(entry, dict)]
    if key in names:
        return next(i for i, entry in enumerate(entries) if isinstance(entry, dict) and entry.get("name") == key)
    if key.isdecimal() and int(key) < len(entries):
        return int(key)
    named = [str(name) for name in names if name is not None]
    raise OptionError(
        f"{what}: the list has no entry {key}; give an index below {len(entries)}"
        + (f" or one of the names {', '.join(named)}" if named else "")
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]

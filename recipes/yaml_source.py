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
_PREFIX = "tag:yaml.org,2002:"
_COLLECTIONS = (f"{_PREFIX}map", f"{_PREFIX}seq")
_TEXTS = (f"{_PREFIX}str", f"{_PREFIX}timestamp", f"{_PREFIX}binary", f"{_PREFIX}value")
_MERGE = f"{_PREFIX}merge"

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
                value = parse_yaml(text, "the value").document
            except RecipeError as error:
                raise OptionError(f"{option} {_cut(setting)}: {error}") from error
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
        self.visits = 0

    def value(self, node: yaml.Node, path: Place) -> Any:
        where = self._visit(node, len(path))
        self.places[path] = where
        if isinstance(node, yaml.CollectionNode) and node.tag not in _COLLECTIONS:
            raise RecipeError(f"{where}: the tag {_shown(node.tag)} is not for recipes; leave it out")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(child, (*path, index)) for index, child in enumerate(node.value)]
        return self._scalar(node, where)

    def _visit(self, node: yaml.Node, depth: int) -> str:
        """Return where a node is, having counted it: what aliases repeat counts each time."""
        where = f"{self.name}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"
        self.visits += 1
        if depth > MAX_DEPTH or self.visits > MAX_VALUES:
            raise RecipeError(f"{where}: nests or repeats too much for a recipe (anchors that contain themselves?)")
        return where

    def _scalar(self, node: yaml.Node, where: str) -> str | bool | int | float | None:
        # Dates and bytes are YAML's own types; recipes know them only as texts.
        if node.tag in _TEXTS:
            return str(node.value)
        try:
            value = self.loader.construct_object(node)
        except (ValueError, LookupError, AttributeError) as error:  # what PyYAML lets out for `0x_` or `!!bool maybe`
            kind = node.tag.removeprefix(_PREFIX)
            raise RecipeError(
                f"{where}: {_shown(node.value)} cannot be read as YAML's {kind}; put a text in quotes"
            ) from error
        return value if value is None or isinstance(value, str | bool | int | float) else str(node.value)

    def _mapping(self, node: yaml.MappingNode, path: Place) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key, (where, value_node) in self._entries(node, len(path)).items():
            mapping[key] = self.value(value_node, (*path, key))
            self.keys[(*path, key)] = where
        return mapping

    def _entries(self, node: yaml.MappingNode, depth: int) -> dict[str, tuple[str, yaml.Node]]:
        """Return place and value by key; a mapping's own keys go before those it merges with `<<`."""
        entries: dict[str, tuple[str, yaml.Node]] = {}
        merged: list[yaml.MappingNode] = []
        for key_node, value_node in node.value:
            where = self._visit(key_node, depth)
            if key_node.tag == _MERGE:
                merged += self._merged(value_node)
                continue
            key = self._scalar(key_node, where) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                shown = _shown(key_node.value) if isinstance(key_node, yaml.ScalarNode) else f"of a {key_node.id}"
                raise RecipeError(f"{where}: the key {shown} is not a text; put it in quotes")
            if key in entries:
                raise RecipeError(f"{where}: {key} is given twice; leave one of them out")
            entries[key] = where, value_node
        for other in merged:
            for key, entry in self._entries(other, depth + 1).items():
                entries.setdefault(key, entry)
        return entries

    def _merged(self, node: yaml.Node) -> list[yaml.MappingNode]:
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        mappings = [found for found in nodes if isinstance(found, yaml.MappingNode)]
        if len(mappings) != len(nodes):
            where = f"{self.name}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"
            raise RecipeError(f"{where}: `<<` takes a mapping or a list of mappings, such as *anchor")
        return mappings


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
                if document.get(key) is None:  # `name:` with nothing after it stands for all defaults
                    document[key] = {}
                document = document[key]
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
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]

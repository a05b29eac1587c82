"""The JSON Schema of pipeline recipes, with which editors complete and check them while they are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferencex.formats.export.export import FORMATS
from inferencex.recipes.pipeline import conversions, evaluations
from inferencex.recipes.pipeline.options import command_options, option_type
from inferencex.recipes.pipeline.recipe import Pipeline

_KINDS = {int: {"type": "integer"}, float: {"type": "number"}}


def schema() -> dict[str, Any]:
    """Return the schema; options are those that the commands have."""
    document = Pipeline.model_json_schema()
    parts = document["$defs"]
    convert = {name: _option(option) for name, option in _stated(conversions.known_options()).items()}
    parts["Conversion"]["properties"]["options"] |= _mapping(convert)
    parts["Conversion"]["properties"]["matrix"] |= _mapping(
        {name: {"type": "array", "minItems": 1, "items": value} for name, value in convert.items()}
    )
    known = {name: option for name, option in command_options(evaluations.MODULE).items() if name not in _NOT_OF_GATES}
    parts["Gate"]["properties"]["options"] |= _mapping({name: _option(o) for name, o in _stated(known).items()})
    parts["Export"]["properties"]["format"]["enum"] = list(FORMATS)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **document}


_NOT_OF_GATES = {*evaluations.OWN, "help", "debug"}


def _stated(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by the names that recipes give them."""
    return {name.replace("-", "_"): option for name, option in sorted(options.items())}


def _mapping(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of an object with these properties, which may be written with dashes too."""
    dashed = {name.replace("_", "-"): value for name, value in properties.items() if "_" in name}
    return {"type": "object", "properties": {**properties, **dashed}, "additionalProperties": False}


def _option(option: Any) -> dict[str, Any]:
    if option.is_flag:
        kind: dict[str, Any] = {"type": "boolean"}
    elif option.multiple:
        kind = {"type": ["array", "string"], "items": {"type": "string"}}
    else:
        kind = dict(_KINDS.get(option_type(option), {"type": ["string", "number"]}))
    return {**kind, "description": option.help} if option.help else kind

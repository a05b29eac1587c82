from __future__ import annotations

from inferencex.runtime.server.tools.forced import MAX_CALLS, either, relocated, schema

NODE = {
    "type": "object",
    "properties": {"next": {"$ref": "#"}, "value": {"$ref": "#/$defs/value"}},
    "$defs": {"value": {"type": "integer"}},
}


def test_references_go_along_with_the_schemas_they_are_in() -> None:
    moved = schema([{"name": "f", "parameters": NODE}], parallel=False)["$defs"]["arguments0"]
    assert moved["properties"]["next"] == {"$ref": "#/$defs/arguments0"}
    assert moved["properties"]["value"] == {"$ref": "#/$defs/arguments0/$defs/value"}
    both = either(NODE, schema([{"name": "f", "parameters": NODE}], parallel=True))
    assert both["anyOf"][0]["properties"]["next"] == {"$ref": "#/anyOf/0"}
    [call] = [both["anyOf"][1]["items"]]
    assert call["properties"]["arguments"] == {"$ref": "#/anyOf/1/$defs/arguments0"}


def test_a_property_of_that_name_is_no_reference() -> None:
    part = {"properties": {"$ref": {"type": "string"}}, "enum": ["#"]}
    assert relocated(part, "#/x") == part


def test_the_number_of_calls_is_bounded() -> None:
    tools = [{"name": "f"}, {"name": "g", "parameters": None}]
    assert schema(tools, parallel=False)["maxItems"] == 1
    several = schema(tools, parallel=True)
    assert (several["minItems"], several["maxItems"]) == (1, MAX_CALLS)
    assert [call["properties"]["name"] for call in several["items"]["anyOf"]] == [{"const": "f"}, {"const": "g"}]


def test_only_declared_arguments_are_given() -> None:
    tools = [{"name": "f"}, {"name": "g", "parameters": {"additionalProperties": {"type": "integer"}}}]
    first, second = schema(tools, parallel=False)["$defs"].values()
    assert first == {"type": "object", "properties": {}, "additionalProperties": False}
    assert second["additionalProperties"] == {"type": "integer"}

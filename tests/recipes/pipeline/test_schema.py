"""The JSON Schema is that of the models, and the shipped recipes and what they say fit it."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from inferencex.recipes.pipeline.graph import build_graph, read_pipeline
from inferencex.recipes.pipeline.schema import schema
from tests.recipes.pipeline.conftest import ROOT

SHIPPED = sorted((ROOT / "recipes/pipelines").glob("*.yaml"))
NAMES = {"chat-int4-balanced", "int4-smallest-under-kl", "int8-w8a8-cpu", "fp8-gpu", "moe", "long-context"}


def test_file_is_in_step() -> None:
    stored = json.loads((ROOT / "recipes/schema/pipeline.schema.json").read_text(encoding="utf-8"))
    hint = "inferencex pipeline --schema > recipes/schema/pipeline.schema.json"
    assert stored == schema(), f"run: {hint}"
    jsonschema.Draft202012Validator.check_schema(stored)


def test_all_are_shipped() -> None:
    assert {path.stem for path in SHIPPED} == NAMES


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes_fit(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# yaml-language-server: $schema=../schema/pipeline.schema.json\n#\n# ")
    assert "#   inferencex pipeline " + path.stem in text, "a comment says when to use it, and how"
    document = yaml.safe_load(text)
    jsonschema.Draft202012Validator(schema()).validate(document)
    recipe, source = read_pipeline(path)
    assert recipe.name == path.stem and recipe.gates and recipe.publish
    build_graph(recipe, source, path.parent)


@pytest.mark.parametrize("wrong", [{"quantisation": "int4"}, {"group_size": "x"}, {"verify": "yes"}, {"output": "x"}])
def test_editors_see_wrong_options(wrong: dict[str, str]) -> None:
    document = yaml.safe_load(SHIPPED[0].read_text(encoding="utf-8"))
    document["conversions"][0]["options"] = wrong
    assert not jsonschema.Draft202012Validator(schema()).is_valid(document)

"""Recipes: what may be said, and mistakes shown with line and column."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("pydantic", reason="needs the package pydantic")
pytest.importorskip("jsonschema", reason="needs the package jsonschema")

import jsonschema
import yaml

from inferencex.formats.errors import OptionError, RecipeError
from inferencex.recipes import shipped
from inferencex.recipes.evaluation.recipe import digest, load_recipe, schema

SCHEMA = shipped.FOLDER / "schema" / "evaluation.schema.json"
SHIPPED = sorted(path.stem for path in shipped.FOLDER.glob("*.yaml"))


def _load(tmp_path: Path, text: str, *settings: str) -> object:
    (tmp_path / "r.yaml").write_text(text)
    return load_recipe(tmp_path / "r.yaml", settings)


def test_the_schema_is_up_to_date() -> None:
    assert json.loads(SCHEMA.read_text()) == schema(), "write it again: inferencex eval --schema"
    jsonschema.Draft202012Validator.check_schema(schema())


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_are_valid(name: str) -> None:
    path = shipped.recipe_file(name)
    recipe = load_recipe(path)
    assert recipe.name == name and recipe.description
    jsonschema.validate(yaml.safe_load(path.read_text()), schema())
    first = path.read_text().splitlines()[0]
    assert (path.parent / first.partition("$schema=")[2]).is_file()


def test_a_recipe_that_is_not_there() -> None:
    with pytest.raises(OptionError, match=r"--recipe nowhere: there is no such file; .* accuracy, smoke"):
        shipped.recipe_file("nowhere")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tasks: {}\n", r"r.yaml:1:1: measures nothing"),
        ("tasks:\n  piqa:\n    limits: 3\n", r"r.yaml:3:5: tasks.piqa.limits is not known here"),
        ("tasks:\n  piqa: {limit: 0}\n", r"r.yaml:2:17: tasks.piqa.limit is 0: .*greater than or equal to 1"),
        ("tasks:\n  piqa: {labels: x}\n", r"r.yaml:2:9: .*labels and fewshot_path are for questions from a file"),
        ("perplexity:\n  length: many\n", r"r.yaml:2:11: perplexity.length is 'many'"),
        ("perplexity: {}\nthresholds:\n  max_kl: 1\n", r"r.yaml:3:11: max_kl is about fidelity"),
        ("perplexity: {}\nthresholds: {min_relative_accuracy: 1}\n", r"r.yaml:2:37: .* is about tasks"),
        ("tasks: {piqa: }\nthresholds:\n  max_perplexity: 9\n", r"r.yaml:3:19: .* about perplexity or fidelity"),
        ("tasks: {piqa: }\nthresholds:\n  min_score:\n    arc: 0.5\n", r"r.yaml:4:10: there is no task arc; .* piqa"),
        ("fidelity: {}\nthresholds: {max_kl: .inf}\n", r"r.yaml:2:22: .*finite"),
        ("fidelity: {}\nfidelity: {}\n", r"r.yaml:2:1: fidelity is given twice"),
        ("fidelity: [\n", r"r.yaml:2:1: is not YAML"),
        ("engine: {backend: auto, dtype: x}\nfidelity: {}\n", r"r.yaml:1:25: engine.dtype is not known here"),
    ],
)
def test_mistakes_are_shown_where_they_are(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        _load(tmp_path, text)


def test_paths_are_seen_from_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a text")
    (tmp_path / "bundle").mkdir()
    (tmp_path / "r.yaml").write_text(
        "baseline: bundle\nfidelity: {text: text.txt}\nperplexity: {text: builtin}\ntasks: {piqa: {path: q.jsonl}}\n"
    )
    recipe = load_recipe(tmp_path / "r.yaml")
    assert recipe.baseline == str(tmp_path / "bundle")
    assert recipe.fidelity is not None and recipe.fidelity.text == str(tmp_path / "text.txt")
    assert recipe.perplexity is not None and recipe.perplexity.text == "builtin"
    assert recipe.task("piqa").path == tmp_path / "q.jsonl"


def test_settings_change_a_recipe_and_its_digest(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("fidelity: {windows: 2}\n")
    plain = load_recipe(tmp_path / "r.yaml")
    changed = load_recipe(tmp_path / "r.yaml", ("thresholds.max_kl=0.5", "fidelity.windows=3"))
    assert changed.thresholds.max_kl == 0.5 and changed.fidelity is not None and changed.fidelity.windows == 3
    assert digest(plain) != digest(changed)
    (tmp_path / "r.yaml").write_text("# a comment\nfidelity:\n  windows: 2\n")
    assert digest(load_recipe(tmp_path / "r.yaml")) == digest(plain)

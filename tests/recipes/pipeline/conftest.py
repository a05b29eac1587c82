"""Recipes over a made-up checkpoint, and the stand-ins for our commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from inferencex.recipes.pipeline.log import JsonLog
from inferencex.recipes.pipeline.run import PipelineOptions, run
from inferencex.recipes.pipeline.schedule import StepResult

COMMANDS = "tests.recipes.pipeline.commands"
ROOT = Path(__file__).resolve().parents[3]

RECIPE = """\
name: demo
source:
  model: {source}
conversions:
  - name: int4
    options: {{quantization: rtn-int4}}
gates:
  - name: quality
    recipe: smoke
    baseline: int4
exports:
  - format: gguf
publish:
  - to: {published}
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def recipe(tmp_path: Path, checkpoint: Path) -> Path:
    path = tmp_path / "demo.yaml"
    path.write_text(RECIPE.format(source=checkpoint, published=tmp_path / "published"), encoding="utf-8")
    return path


@pytest.fixture
def counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Return a function that says which commands have begun so far."""
    path = tmp_path / "counts.txt"
    path.touch()
    monkeypatch.setenv("COUNTS", str(path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return lambda: path.read_text(encoding="utf-8").split()


@pytest.fixture
def run_recipe(tmp_path: Path, recipe: Path, counts: Callable[[], list[str]]) -> Callable[..., dict[str, StepResult]]:
    """Return a function that runs the recipe with settings and gives the results by step."""

    def run_it(*settings: str, jobs: int = 2) -> dict[str, StepResult]:
        options = PipelineOptions(recipe, settings, work_dir=tmp_path / "work", jobs=jobs, commands=COMMANDS)
        with (tmp_path / "log.jsonl").open("w", encoding="utf-8") as log:
            results = run(options, JsonLog(log))
        return {result.step.id: result for result in results}

    return run_it

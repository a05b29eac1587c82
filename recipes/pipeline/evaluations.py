"""Steps that evaluate: `inferencex eval`, once for each bundle and gate."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from inferencex.formats.bundle.layout import MANIFEST_FILE
from inferencex.formats.errors import RecipeError
from inferencex.recipes.evaluation.recipe import EvaluationRecipe, load_recipe
from inferencex.recipes.pipeline.base import Estimate, Inputs, JsonObject, Outcome, Step
from inferencex.recipes.pipeline.conversions import BUNDLE, ConvertStep
from inferencex.recipes.pipeline.estimates import evaluation_estimate
from inferencex.recipes.pipeline.hashing import file_digest, json_digest, visible_files
from inferencex.recipes.pipeline.options import arguments
from inferencex.recipes.pipeline.recipe import Gate
from inferencex.recipes.pipeline.tools import EVALUATING, versions
from inferencex.recipes.yaml_source import read_yaml

if TYPE_CHECKING:
    from inferencex.recipes.evaluation.results import Evaluation

MODULE = "inferencex.recipes.evaluation.cli"
# What the pipeline says itself.
OWN = ("recipe", "baseline", "limit", "output", "json", "schema")
RESULTS = "results"
RESULTS_FILE = "results.json"
JUNIT_FILE = "junit.xml"


class EvaluateStep(Step):
    """A bundle's way through one gate.

    recipe:    path of the evaluation recipe
    baseline:  the step whose bundle is compared with, or what inferencex eval takes, or None for what the recipe says
    """

    def __init__(self, conversion: ConvertStep, gate: Gate, recipe: Path, baseline: ConvertStep | str | None) -> None:
        needs = (conversion.id, *((baseline.id,) if isinstance(baseline, ConvertStep) else ()))
        super().__init__("evaluate", f"{conversion.name}:{gate.name}", tuple(dict.fromkeys(needs)))
        self.conversion, self.gate, self.recipe, self.baseline = conversion, gate, recipe, baseline
        self.arguments = arguments(MODULE, gate.options, refused=OWN)
        given = gate.options.get("set", [])
        self.settings = tuple(given) if isinstance(given, list) else (str(given),)

    def ingredients(self) -> JsonObject:
        """See `Step`; the recipe counts by what it says, and the files it names by their hashes."""
        recipe = load_recipe(self.recipe, self.settings)
        return {
            "recipe": json_digest(read_yaml(self.recipe).document),
            "files": [[path.name, file_digest(path)] for path in _files(recipe)],
            "baseline": self._baseline_ingredient(recipe),
            "limit": self.gate.limit,
            "options": self.gate.options,
            "tools": versions(EVALUATING),
        }

    def _baseline_ingredient(self, recipe: EvaluationRecipe) -> str | None:
        """Return what the baseline counts by: the hashes of its files where it is on this machine, or its name."""
        baseline = recipe.baseline if self.baseline is None else self.baseline
        if isinstance(baseline, ConvertStep):
            return "a step's bundle"  # whose digest the key has already
        path = None if baseline is None else Path(baseline)
        if path is None or not path.exists():
            return baseline
        if path.is_file():
            return file_digest(path)
        manifest = path / MANIFEST_FILE  # it has the hashes of a bundle's other files
        files = [manifest] if manifest.is_file() else visible_files(path)
        return json_digest({file.relative_to(path).as_posix(): file_digest(file) for file in files})

    def estimate(self) -> Estimate:
        """See `Step`."""
        return evaluation_estimate(self.conversion.estimate().disk, self.gate.limit, os.cpu_count() or 1)

    def command(self, folder: Path, inputs: Inputs, threads: int | None) -> list[str] | None:
        """See `Step`; what an interrupted evaluation left is measured again."""
        shutil.rmtree(folder / RESULTS, ignore_errors=True)
        bundle = inputs[self.conversion.id].folder / BUNDLE
        command = ["eval", str(bundle), f"--recipe={self.recipe}", f"--output={folder / RESULTS}", *self.arguments]
        if self.baseline is not None:
            baseline = self.baseline
            named = inputs[baseline.id].folder / BUNDLE if isinstance(baseline, ConvertStep) else baseline
            command.append(f"--baseline={named}")
        if self.gate.limit is not None:
            command.append(f"--limit={self.gate.limit}")
        return command

    def finish(self, folder: Path, inputs: Inputs, status: int, log: str) -> Outcome:
        """See `Step`; a gate that is not passed is an outcome, an evaluation that failed is not."""
        path = folder / RESULTS / RESULTS_FILE
        if status not in (0, 1) or not path.is_file():
            raise RecipeError(f"{self.id}: {log}")
        from inferencex.recipes.evaluation.results import read_evaluation

        results = read_evaluation(path)
        if results.passed != (status == 0):
            raise RecipeError(f"{self.id}: {log or f'{path} names checks that failed, and the exit status is 0'}")
        failures = [str(check) for check in results.checks if not check.passed]
        facts: JsonObject = {"figures": figures(results), "failures": failures}
        return Outcome(json_digest(facts), facts, passed=results.passed)


def figures(results: Evaluation) -> dict[str, float]:
    """Return what was measured of the bundle, by name; timings and sizes are not part of it."""
    found: dict[str, float] = {}
    for section in (results.perplexity, results.fidelity):
        for name in ("perplexity", "mean_kl", "p99_kl", "same_top1") if section is not None else ():
            figure = getattr(section, name)
            if figure is not None:
                found[name] = figure.value
    found |= {f"{task.task} {task.metric}": task.score for task in results.tasks}
    return {name: float(f"{value:.6g}") for name, value in found.items() if math.isfinite(value)}


def _files(recipe: EvaluationRecipe) -> Iterator[Path]:
    """Yield the files that a recipe names, in the order of the recipe."""
    for measure in (recipe.perplexity, recipe.fidelity):
        if measure is not None and Path(measure.text).is_file():
            yield Path(measure.text)
    for name in recipe.tasks:
        options = recipe.task(name)
        for path in (options.path, options.labels, options.fewshot_path):
            if path is not None and path.is_file():
                yield path

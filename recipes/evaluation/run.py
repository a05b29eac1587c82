"""One evaluation from beginning to end: predictions, tasks, the baseline's tasks, thresholds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from inferencex.formats.errors import BundleError, OptionError
from inferencex.recipes.comparison.output import size_of
from inferencex.recipes.evaluation.baseline import MANIFEST, Baseline
from inferencex.recipes.evaluation.predictions import Predictions, measure_predictions
from inferencex.recipes.evaluation.progress import Unwatched, Watcher
from inferencex.recipes.evaluation.recipe import EngineOptions, EvaluationRecipe, TextMeasure, digest
from inferencex.recipes.evaluation.results import BaselineScores, Evaluation
from inferencex.recipes.evaluation.tasks import TaskRun, run_tasks
from inferencex.recipes.evaluation.thresholds import check
from inferencex.runtime import LLM


def evaluate(
    bundle: Path,
    recipe: EvaluationRecipe,
    *,
    baseline: Baseline | None = None,
    limit: int | None = None,
    watcher: Watcher | None = None,
) -> Evaluation:
    """Measure what a recipe says of a bundle, and check its thresholds.

    baseline: what to compare with; `open_baseline` makes one of a path or a name
    limit:    questions of a task at most, and windows of a text

    The baseline's tasks run only where a threshold is about them and no stored results have them. Raises OptionError
    or RecipeError when the recipe compares with a baseline that is not given, and what running a bundle raises.
    A threshold that does not hold is no error: see `Evaluation.passed`.
    """
    watcher = Unwatched() if watcher is None else watcher
    if not (bundle / MANIFEST).is_file():
        raise BundleError(f"{bundle}: is no bundle: it has no {MANIFEST}; inferencex-convert makes one of a checkpoint")
    _check_baseline(recipe, baseline)
    if baseline is not None and baseline.stored is not None:
        _check_same_questions(recipe, baseline.name, baseline.stored, limit, watcher)
    model = None if baseline is None else baseline.bundle

    def predictions(measure: TextMeasure | None, section: str, beside: Path | None) -> Predictions | None:
        if measure is None:
            return None
        if limit is not None:
            measure = measure.model_copy(update={"windows": min(limit, measure.windows)})
        return measure_predictions(bundle, beside, measure, recipe.engine, section, watcher)

    relative = recipe.thresholds.max_relative_perplexity is not None
    found = Evaluation(
        recipe=recipe.name,
        recipe_sha256=digest(recipe),
        bundle=str(bundle),
        size_bytes=size_of(bundle),
        limit=limit,
        perplexity=predictions(recipe.perplexity, "perplexity", model if relative else None),
        fidelity=predictions(recipe.fidelity, "fidelity", model),
        baseline=None if baseline is None else BaselineScores(baseline.name),
    )
    if recipe.tasks:
        run = _tasks(bundle, recipe, limit, watcher)
        found = replace(found, tasks=run.scores, seconds=run.seconds)
    if baseline is not None:
        found = replace(found, baseline=_baseline_scores(recipe, baseline, limit, watcher, found))
    return replace(found, checks=check(found, recipe.thresholds))


def load(bundle: Path, engine: EngineOptions) -> LLM:
    """Load a bundle as a recipe says."""
    return LLM(
        bundle,
        backend=engine.backend,
        threads=engine.threads,
        activation_dtype=engine.activation_dtype,
        kv_cache_dtype=engine.kv_cache_dtype,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        kv_cache_memory=engine.kv_cache_memory,
    )


def _tasks(bundle: Path, recipe: EvaluationRecipe, limit: int | None, watcher: Watcher) -> TaskRun:
    with load(bundle, recipe.engine) as llm:
        return run_tasks(llm, recipe, limit, watcher)


def _check_baseline(recipe: EvaluationRecipe, baseline: Baseline | None) -> None:
    """Raise OptionError, before anything runs, when the recipe needs a baseline that it does not get."""
    if recipe.fidelity is not None and (baseline is None or baseline.bundle is None):
        got = "there is none" if baseline is None else f"{baseline.name} holds figures only"
        raise OptionError(
            f"the recipe {recipe.name} measures fidelity to a model, and {got}; give --baseline a bundle or a "
            "checkpoint, or leave the section fidelity out"
        )
    limits = recipe.thresholds
    compared = [
        name for name in ("min_relative_accuracy", "max_relative_perplexity") if getattr(limits, name) is not None
    ]
    if compared and baseline is None:
        raise OptionError(f"thresholds.{compared[0]} compares with a baseline; give --baseline a model or results.json")
    if baseline is None or baseline.bundle is not None or baseline.stored is None:
        return
    stored = {task.task for task in baseline.stored.tasks}
    missing = [f"score of {name}" for name in recipe.tasks if name not in stored]
    if limits.min_relative_accuracy is None:
        missing = []
    if limits.max_relative_perplexity is not None and baseline.stored.measured_perplexity is None:
        missing.append("perplexity")
    if missing:
        raise OptionError(
            f"--baseline {baseline.name}: has no {', no '.join(missing)} to compare with; give a model, or results of "
            "the same recipe"
        )


def _baseline_scores(
    recipe: EvaluationRecipe, baseline: Baseline, limit: int | None, watcher: Watcher, found: Evaluation
) -> BaselineScores:
    """Return what the baseline has of what was found: stored scores of the same metric and questions, or a run's."""
    scores: dict[str, float] = {}
    perplexity = None
    if baseline.stored is not None:
        stored = {task.task: task for task in baseline.stored.tasks}
        for task in found.tasks:
            other = stored.get(task.task)
            if other is None or (other.samples, other.num_fewshot) != (task.samples, task.num_fewshot):
                continue
            if other.metric == task.metric:
                scores[task.task] = other.score
            elif task.metric in other.metrics:
                scores[task.task] = other.metrics[task.metric]
        measured, ours = baseline.stored.measured_perplexity, found.measured_perplexity
        if measured is not None and ours is not None and _same_text(measured, ours):
            perplexity = measured.perplexity.value
    missing = [name for name in recipe.tasks if name not in scores]
    if missing and baseline.bundle is not None and recipe.thresholds.min_relative_accuracy is not None:
        watcher.note(f"tasks of the baseline {baseline.name}")
        exact = recipe.engine.model_copy(update={"activation_dtype": "float32", "kv_cache_dtype": "float32"})
        tasks = {name: recipe.tasks[name] for name in missing}
        run = _tasks(baseline.bundle, recipe.model_copy(update={"engine": exact, "tasks": tasks}), limit, watcher)
        scores |= {task.task: task.score for task in run.scores}
    return BaselineScores(baseline.name, scores, perplexity)


def _same_text(one: Predictions, other: Predictions) -> bool:
    return (one.text, one.windows, one.length) == (other.text, other.windows, other.length)


def _check_same_questions(
    recipe: EvaluationRecipe, name: str, stored: Evaluation, limit: int | None, watcher: Watcher
) -> None:
    if stored.limit != limit:
        raise OptionError(
            f"--baseline {name}: was measured with --limit {stored.limit}, this evaluation has {limit}; the "
            "questions must be the same"
        )
    if stored.recipe_sha256 != digest(recipe):
        watcher.note(
            f"note: {name} was measured with another form of the recipe; what it has of the same questions is taken"
        )

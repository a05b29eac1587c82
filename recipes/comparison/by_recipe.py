"""The same recipe over several bundles: each is evaluated against the reference, which is evaluated first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from inferencex.recipes.comparison.rows import Row
from inferencex.recipes.evaluation.baseline import Baseline
from inferencex.recipes.evaluation.progress import Watcher
from inferencex.recipes.evaluation.recipe import EvaluationRecipe, Thresholds
from inferencex.recipes.evaluation.results import Evaluation
from inferencex.recipes.evaluation.run import evaluate


def compare_by_recipe(
    recipe: EvaluationRecipe, reference: Path, bundles: Sequence[Path], limit: int | None, watcher: Watcher
) -> list[Row]:
    """Return a row for the reference and for each bundle; the reference's tasks run once.

    Thresholds are about the bundles, not about the reference. Raises what `evaluate` raises.
    """
    watcher.note(f"reference: {reference}")
    exact = recipe.engine.model_copy(update={"activation_dtype": "float32", "kv_cache_dtype": "float32"})
    plain = recipe.model_copy(update={"engine": exact, "thresholds": Thresholds()})
    first = evaluate(reference, plain, baseline=Baseline(str(reference), reference), limit=limit, watcher=watcher)
    rows = [_row(first, None)]
    for bundle in bundles:
        watcher.note(f"bundle: {bundle}")
        against = Baseline(str(reference), reference, first)
        found = evaluate(bundle, recipe, baseline=against, limit=limit, watcher=watcher)
        rows.append(_row(found, found.passed if found.checks else None))
    return rows


def _row(found: Evaluation, passed: bool | None) -> Row:
    fidelity, predictions = found.fidelity, found.measured_perplexity
    figures = {}
    for name in ("mean_kl", "p99_kl", "same_top1"):
        figure = None if fidelity is None else getattr(fidelity, name)
        figures[name] = None if figure is None else figure.value
    return Row(
        bundle=found.bundle,
        size_bytes=found.size_bytes,
        tokens=0 if fidelity is None else fidelity.windows * fidelity.length,
        perplexity=None if predictions is None else predictions.perplexity.value,
        scores={task.task: task.score for task in found.tasks},
        passed=passed,
        **figures,
    )

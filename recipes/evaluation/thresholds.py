"""Whether what was measured is what a recipe demands."""

from __future__ import annotations

import math
from collections.abc import Iterator

from inferencex.formats.errors import RecipeError
from inferencex.recipes.evaluation.recipe import Thresholds
from inferencex.recipes.evaluation.results import Check, Evaluation


def check(evaluation: Evaluation, thresholds: Thresholds) -> tuple[Check, ...]:
    """Return one check for each threshold, and for each task that it is about.

    Raises RecipeError when a threshold compares with a baseline that does not have the number.
    """
    return tuple(_checks(evaluation, thresholds))


def _checks(evaluation: Evaluation, limits: Thresholds) -> Iterator[Check]:
    fidelity, predictions = evaluation.fidelity, evaluation.measured_perplexity
    if fidelity is not None:
        for name, figure in (("max_kl", fidelity.mean_kl), ("max_p99_kl", fidelity.p99_kl)):
            limit = getattr(limits, name)
            if limit is not None:
                assert figure is not None, "fidelity is measured beside a baseline"
                yield _at_most(name, figure.value, limit)
        if limits.min_same_top1 is not None:
            assert fidelity.same_top1 is not None, "fidelity is measured beside a baseline"
            yield _at_least("min_same_top1", fidelity.same_top1.value, limits.min_same_top1)
    if predictions is not None:
        perplexity = predictions.perplexity.value
        if limits.max_perplexity is not None:
            yield _at_most("max_perplexity", perplexity, limits.max_perplexity)
        if limits.max_relative_perplexity is not None:
            relative = perplexity / _baseline_perplexity(evaluation)
            yield _at_most("max_relative_perplexity", relative, limits.max_relative_perplexity)
    if limits.min_relative_accuracy is not None:
        for task in evaluation.tasks:
            score, baseline = task.score, _baseline_score(evaluation, task.task)
            relative = _relative(score, baseline) if task.higher_is_better else _relative(baseline, score)
            yield _at_least(f"min_relative_accuracy.{task.task}", relative, limits.min_relative_accuracy)
    tasks = {task.task: task for task in evaluation.tasks}
    for name, limit in limits.min_score.items():
        if not tasks[name].higher_is_better:
            raise RecipeError(
                f"thresholds.min_score.{name}: of {tasks[name].metric} less is better; name another metric, or demand "
                "min_relative_accuracy"
            )
        yield _at_least(f"min_score.{name}", tasks[name].score, limit)


def _at_most(name: str, found: float, limit: float) -> Check:
    return Check(name, found, "at most", limit, found <= limit)


def _at_least(name: str, found: float, limit: float) -> Check:
    return Check(name, found, "at least", limit, found >= limit)


def _relative(score: float, baseline: float) -> float:
    """Return a score by the baseline's; by one that is not positive, whether it is better (inf), equal (1) or worse."""
    if baseline <= 0.0:
        return 1.0 if score == baseline else math.inf if score > baseline else 0.0
    return score / baseline


def _baseline_score(evaluation: Evaluation, task: str) -> float:
    baseline = evaluation.baseline
    if baseline is None or task not in baseline.scores:
        raise RecipeError(
            f"thresholds.min_relative_accuracy: there is no score of {task} to compare with; give --baseline a model, "
            "or results of the same recipe"
        )
    return baseline.scores[task]


def _baseline_perplexity(evaluation: Evaluation) -> float:
    predictions, baseline = evaluation.measured_perplexity, evaluation.baseline
    if predictions is not None and predictions.baseline_perplexity is not None:
        return predictions.baseline_perplexity
    if baseline is None or baseline.perplexity is None:
        raise RecipeError(
            "thresholds.max_relative_perplexity: there is no perplexity to compare with; give --baseline a model, or "
            "results of the same recipe"
        )
    return baseline.perplexity

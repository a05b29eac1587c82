"""Thresholds on figures that are known: where less is better, and against stored results of something else."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from inferencex.formats.errors import RecipeError
from inferencex.recipes.evaluation.baseline import Baseline
from inferencex.recipes.evaluation.predictions import Figure, Predictions
from inferencex.recipes.evaluation.progress import Unwatched
from inferencex.recipes.evaluation.recipe import EvaluationRecipe, Thresholds
from inferencex.recipes.evaluation.results import BaselineScores, Check, Evaluation, read_evaluation
from inferencex.recipes.evaluation.run import _baseline_scores
from inferencex.recipes.evaluation.tasks import TaskScore
from inferencex.recipes.evaluation.thresholds import check


def _evaluation(task: TaskScore, baseline: float | None = None, perplexity: Predictions | None = None) -> Evaluation:
    against = None if baseline is None else BaselineScores("b", {task.task: baseline})
    return Evaluation("r", "0" * 64, "bundle", 1, tasks=(task,), baseline=against, perplexity=perplexity)


@pytest.mark.parametrize(
    ("higher_is_better", "score", "baseline", "passed"),
    [
        (True, 0.5, 0.5, True),
        (True, 0.4, 0.5, False),
        (False, 20.0, 20.0, True),
        (False, 40.0, 20.0, False),
        (False, 10.0, 20.0, True),
        (True, -0.4, -0.2, False),
        (True, -0.1, -0.2, True),
        (True, 0.1, 0.0, True),
    ],
)
def test_relative_scores(higher_is_better: bool, score: float, baseline: float, passed: bool) -> None:
    task = TaskScore("t", "m", score, None, 10, 0, higher_is_better=higher_is_better)
    (found,) = check(_evaluation(task, baseline), Thresholds(min_relative_accuracy=0.99))
    assert found.passed == passed


def test_a_lowest_score_is_of_what_should_be_high() -> None:
    task = TaskScore("t", "perplexity", 20.0, None, 10, 0, higher_is_better=False)
    with pytest.raises(RecipeError, match=r"thresholds\.min_score\.t: of perplexity less is better"):
        check(_evaluation(task), Thresholds(min_score={"t": 5.0}))


def test_stored_scores_count_where_metric_and_questions_are_the_same() -> None:
    text = Predictions("a.txt", 4, 32, Figure(9.0))
    mine = TaskScore("t", "acc", 0.5, None, 10, 0)
    recipe = EvaluationRecipe.model_validate({"tasks": {"t": None}})

    def scores(task: TaskScore, measured: Predictions) -> BaselineScores:
        stored = Baseline("s", stored=_evaluation(task, perplexity=measured))
        return _baseline_scores(recipe, stored, None, Unwatched(), _evaluation(mine, perplexity=text))

    metrics = {"acc": 0.4, "acc_norm": 0.6}
    found = scores(TaskScore("t", "acc_norm", 0.6, None, 10, 0, metrics), text)
    assert found.scores == {"t": 0.4} and found.perplexity == 9.0
    assert not scores(TaskScore("t", "f1", 0.6, None, 10, 0, {"f1": 0.6}), text).scores
    assert not scores(TaskScore("t", "acc", 0.6, None, 20, 0, metrics), text).scores
    assert not scores(TaskScore("t", "acc", 0.6, None, 10, 5, metrics), text).scores
    assert scores(mine, Predictions("b.txt", 4, 32, Figure(9.0))).perplexity is None


def test_figures_that_are_not_finite_are_read_back(tmp_path: Path) -> None:
    fidelity = Predictions("t", 1, 8, Figure(math.nan), math.nan, Figure(math.inf), Figure(math.nan), Figure(0.0))
    failed = Check("max_kl", math.inf, "at most", 0.1, False)
    task = TaskScore("t", "perplexity", math.inf, None, 1, 0, {"perplexity": math.inf})
    written = Evaluation("r", "0" * 64, "b", 1, fidelity=fidelity, tasks=(task,), checks=(failed,))
    found = read_evaluation(written.write(tmp_path))
    assert found.fidelity is not None and found.fidelity.mean_kl is not None
    assert math.isnan(found.fidelity.mean_kl.value) and math.isnan(found.tasks[0].score)
    assert str(found.checks[0]) == "max_kl: nan, but must be at most 0.1" and not found.passed

"""What an evaluation found, as it is kept in results.json, compared and printed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from inferencex.formats.errors import RecipeError
from inferencex.recipes.evaluation.predictions import Figure, Predictions
from inferencex.recipes.evaluation.tasks import TaskScore

FORMAT = 1
RESULTS_FILE = "results.json"


@dataclass(frozen=True)
class Check:
    """Whether one threshold holds.

    name:  the threshold, and the task where it is about one: `max_kl`, `min_score.arc_easy`
    found: the number that was measured
    bound: "at most" or "at least"
    """

    name: str
    found: float
    bound: str
    limit: float
    passed: bool

    def __str__(self) -> str:
        found, limit = (f"{value:.6g}" for value in (self.found, self.limit))
        return f"{self.name}: {found}, {'' if self.passed else 'but must be '}{self.bound} {limit}"


@dataclass(frozen=True)
class BaselineScores:
    """What the baseline has: its name, scores by task, and perplexity where it was stored."""

    name: str
    scores: Mapping[str, float] = field(default_factory=dict)
    perplexity: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """Everything that one evaluation found.

    recipe, recipe_sha256: name of the recipe and digest of what it asks
    bundle:     its path as it was given
    size_bytes: of all files of the bundle
    limit:      questions of a task at most, where the command line said so
    seconds:    of the tasks on the bundle; None without tasks
    """

    recipe: str
    recipe_sha256: str
    bundle: str
    size_bytes: int
    limit: int | None = None
    seconds: float | None = None
    perplexity: Predictions | None = None
    fidelity: Predictions | None = None
    tasks: tuple[TaskScore, ...] = ()
    baseline: BaselineScores | None = None
    checks: tuple[Check, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether all thresholds hold."""
        return all(check.passed for check in self.checks)

    @property
    def measured_perplexity(self) -> Predictions | None:
        """Predictions that the perplexity is taken from: its own section's, or else those of the fidelity."""
        return self.perplexity or self.fidelity

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON data; a number that is not finite is null."""
        document: dict[str, Any] = _finite({"format": FORMAT, "passed": self.passed, **asdict(self)})
        return document

    def write(self, folder: Path) -> Path:
        """Write results.json into a folder and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / RESULTS_FILE
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        return path


def read_evaluation(path: Path) -> Evaluation:
    """Read a results.json. Raises RecipeError when it is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise RecipeError(f"{path}: is of format {document['format']}; this version reads {FORMAT}: evaluate again")
        fields = {name: document[name] for name in Evaluation.__dataclass_fields__}
        for section in ("perplexity", "fidelity"):
            fields[section] = _predictions(fields[section])
        fields["tasks"] = tuple(TaskScore(**_numbers(task, "score")) for task in fields["tasks"])
        fields["checks"] = tuple(Check(**_numbers(check, "found")) for check in fields["checks"])
        if fields["baseline"] is not None:
            fields["baseline"] = BaselineScores(**fields["baseline"])
        return Evaluation(**fields)
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RecipeError(f"{path}: is no results.json of an evaluation ({type(error).__name__}: {error})") from error


def _predictions(document: Mapping[str, Any] | None) -> Predictions | None:
    if document is None:
        return None
    figures = ("perplexity", "mean_kl", "p99_kl", "same_top1")
    values: dict[str, Any] = {
        name: Figure(**_numbers(value, "value")) if name in figures and value else value
        for name, value in document.items()
    }
    return Predictions(**values)


def _numbers(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a document whose `name` is a number: null stands for what was not finite."""
    return {**document, name: math.nan if document[name] is None else document[name]}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

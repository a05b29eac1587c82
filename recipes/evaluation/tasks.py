"""Running tasks of lm-eval on a bundle: scores, their standard errors, and how long it took."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inferencex.formats.errors import InferenceXError, RecipeError
from inferencex.recipes.evaluation.generation import LENGTHS
from inferencex.recipes.evaluation.progress import Watcher
from inferencex.recipes.evaluation.recipe import EvaluationRecipe, TaskOptions
from inferencex.recipes.evaluation.task_files import definitions, find_definition, local_definition
from inferencex.runtime import LLM

_NO_LIMIT = 1 << 62
_RESAMPLES = 1000  # for standard errors of what is no mean, such as LAMBADA's perplexity; lm-eval itself takes 100 000


@dataclass(frozen=True)
class TaskScore:
    """What came out of one task.

    metric:  the score that counts; `exact_match,strict-match` where a filter made the answer
    score:   its value
    stderr:  its standard error; None where lm-eval gives none
    samples: questions
    metrics: all scores by name, and their standard errors
    higher_is_better: of `score`; False for perplexities
    """

    task: str
    metric: str
    score: float
    stderr: float | None
    samples: int
    num_fewshot: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    stderrs: Mapping[str, float] = field(default_factory=dict)
    higher_is_better: bool = True


@dataclass(frozen=True)
class TaskRun:
    """Scores of all tasks, and the seconds that the model took for all of them."""

    scores: tuple[TaskScore, ...]
    seconds: float


def run_tasks(llm: LLM, recipe: EvaluationRecipe, limit: int | None, watcher: Watcher) -> TaskRun:
    """Run the recipe's tasks on a loaded bundle, at most `limit` questions of each.

    Raises RecipeError for tasks that there are not, or whose data cannot be had, and what the engine raises.
    """
    from inferencex.recipes.evaluation.lm import EngineLM

    return score_model(EngineLM(llm, seed=recipe.seed, watcher=watcher), recipe, limit)


def score_model(model: Any, recipe: EvaluationRecipe, limit: int | None) -> TaskRun:
    """Run the recipe's tasks on any model of lm-eval's; see `run_tasks`."""
    with _quiet_lm_eval(), tempfile.TemporaryDirectory(prefix="inferencex-tasks-") as folder:
        return _evaluate(model, recipe, _load(recipe, Path(folder)), limit)


def _evaluate(model: Any, recipe: EvaluationRecipe, loaded: _Loaded, limit: int | None) -> TaskRun:
    from lm_eval.evaluator import evaluate

    counts = {}
    for name, task in loaded.tasks.items():
        most = min(limit or _NO_LIMIT, recipe.task(loaded.owners[name]).limit or _NO_LIMIT)
        counts[name] = min(len(task.eval_docs), most)
    begun = time.perf_counter()
    found = evaluate(
        lm=model,
        task_dict=loaded.as_dict,
        samples={name: list(range(count)) for name, count in counts.items()},
        log_samples=False,
        bootstrap_iters=_RESAMPLES,
        system_instruction=recipe.system_prompt,
        apply_chat_template=recipe.chat_template,
        fewshot_as_multiturn=recipe.fewshot_as_multiturn and recipe.chat_template,
    )
    seconds = time.perf_counter() - begun
    assert found is not None, "one process has all results"
    scores = []
    for name in recipe.tasks:
        members = [member for member, owner in loaded.owners.items() if owner == name]
        samples = sum(counts[member] for member in members)
        higher = found["higher_is_better"].get(name, {})
        scores.append(_score(name, recipe.task(name), found["results"][name], higher, samples, loaded.fewshots[name]))
    return TaskRun(tuple(scores), seconds)


@dataclass
class _Loaded:
    """Tasks by name, the task of the recipe that each belongs to, and what lm-eval takes."""

    tasks: dict[str, Any]
    owners: dict[str, str]
    fewshots: dict[str, int]
    as_dict: dict[str, Any]


def _load(recipe: EvaluationRecipe, folder: Path) -> _Loaded:
    from lm_eval.tasks import TaskManager

    everything: TaskManager | None = None
    loaded = _Loaded({}, {}, {}, {"tasks": {}, "groups": {}, "group_map": {}})
    home = definitions()
    for name in recipe.tasks:
        options = recipe.task(name)
        definition = find_definition(name, home)
        with _blamed(name):
            if options.path is not None:
                path = local_definition(name, options, definition, folder)
                found = TaskManager(include_defaults=False).load([str(path)])
            elif definition is not None:
                found = TaskManager(include_defaults=False, include_path=str(definition.parent)).load([name])
            else:
                everything = everything or TaskManager()
                found = everything.load([name])
        if name not in found["tasks"] and name not in (found.get("groups") or {}):
            members = ", ".join(found["tasks"])
            raise RecipeError(f"tasks.{name}: is a tag, which has no score of its own; name its tasks: {members}")
        kinds = {task.get_config("output_type") for task in found["tasks"].values()}
        if options.generation and "generate_until" not in kinds:
            raise RecipeError(f"tasks.{name}.generation: the task generates nothing; leave generation out")
        shots = []
        for member, task in found["tasks"].items():
            shots.append(_set_up(task, options, recipe.seed))
            loaded.tasks[member] = task
            loaded.owners[member] = name
        loaded.fewshots[name] = max(shots)
        for part in ("tasks", "groups", "group_map"):
            loaded.as_dict[part].update(found.get(part) or {})
    return loaded


def _set_up(task: Any, options: TaskOptions, seed: int) -> int:
    """Give a task its number of examples and its overrides, and return the number."""
    if options.generation and task.get_config("output_type") == "generate_until":
        given = dict(options.generation)
        if any(name in given for name in LENGTHS):  # the task may have said it by another name, which must not win
            known = task.get_config("generation_kwargs") or {}
            given = {**{name: None for name in LENGTHS if name in known}, **given}
        task.set_config(key="generation_kwargs", value=given, update=True)
    shots = options.num_fewshot
    if shots is None:
        shots = task.get_config("num_fewshot") or 0
    task.set_config(key="num_fewshot", value=shots)
    task.set_fewshot_seed(seed=seed)
    return int(shots)


def _score(
    name: str, options: TaskOptions, found: Mapping[str, Any], higher: Mapping[str, bool], samples: int, shots: int
) -> TaskScore:
    metrics: dict[str, float] = {}
    stderrs: dict[str, float] = {}
    for key, value in found.items():
        if "," not in key or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        metric, _, filtered = key.partition(",")
        into = stderrs if metric.endswith("_stderr") else metrics
        metric = metric.removesuffix("_stderr")
        into[metric if filtered == "none" else f"{metric},{filtered}"] = float(value)
    chosen = options.metric or next((each for each in metrics if higher.get(each.partition(",")[0], True)), None)
    if chosen not in metrics:
        raise RecipeError(f"tasks.{name}.metric: lm-eval gives {', '.join(metrics) or 'no scores'}, not {chosen}")
    better = higher.get(chosen.partition(",")[0], True)
    return TaskScore(name, chosen, metrics[chosen], stderrs.get(chosen), samples, shots, metrics, stderrs, better)


@contextmanager
def _blamed(name: str) -> Iterator[None]:
    """Say which task an error of lm-eval or of the data's library is about."""
    try:
        yield
    except InferenceXError:
        raise
    except KeyError as error:
        raise RecipeError(f"tasks.{name}: lm-eval knows no such task, group or tag: {error.args[0]}") from error
    except (OSError, ValueError, TypeError, ImportError) as error:
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise RecipeError(
            f"tasks.{name}: cannot be loaded: {line}; give path for questions from a file, which needs no network"
        ) from error


@contextmanager
def _quiet_lm_eval() -> Iterator[None]:
    """Leave progress and notes to our own, and standard output to results: lm-eval says much, and on both."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # lm-eval would fork a process that holds a model and its threads
    loggers = [logging.getLogger(name) for name in ("lm_eval", "lm-eval", "datasets")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)

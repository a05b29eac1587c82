"""An evaluation as tables: for a terminal, and as Markdown."""

from __future__ import annotations

from rich.table import Table

from inferencex.recipes.evaluation.predictions import Figure, Predictions
from inferencex.recipes.evaluation.results import Evaluation
from inferencex.recipes.evaluation.tasks import TaskScore

_Z95 = 1.96  # standard errors to either side that hold 95 % of a normal distribution


def measures(evaluation: Evaluation) -> list[tuple[str, str, str, str]]:
    """Return rows of what was measured: name, value, 95 % interval, and what the baseline has."""
    rows: list[tuple[str, str, str, str]] = []
    seen = []
    for predictions in (evaluation.perplexity, evaluation.fidelity):
        if predictions is not None:
            rows += _predicted(predictions, with_perplexity=predictions.text not in seen)
            seen.append(predictions.text)
    baseline = {} if evaluation.baseline is None else evaluation.baseline.scores
    for task in evaluation.tasks:
        other = f"{baseline[task.task]:.4f}" if task.task in baseline else ""
        shots = f", {task.num_fewshot}-shot" if task.num_fewshot else ""
        name = f"{task.task} {task.metric} ({task.samples}{shots})"
        rows.append((name, f"{task.score:.4f}", _task_interval(task), other))
    return rows


def table(evaluation: Evaluation) -> Table:
    """Return a table for a terminal."""
    made = Table("measure", "value", "95 % interval", "baseline", title=f"{evaluation.recipe}: {evaluation.bundle}")
    for row in measures(evaluation):
        made.add_row(*row)
    return made


def verdict(evaluation: Evaluation) -> list[str]:
    """Return a line for each threshold, those that do not hold first."""
    ordered = sorted(evaluation.checks, key=lambda check: check.passed)
    return [f"{'passed' if check.passed else 'FAILED'}  {check}" for check in ordered]


def markdown(evaluation: Evaluation) -> str:
    """Return the whole evaluation as Markdown."""
    failed = [check for check in evaluation.checks if not check.passed]
    state = f"**failed**: {len(failed)} of {len(evaluation.checks)} thresholds" if failed else "**passed**"
    if not evaluation.checks:
        state = "no thresholds"
    lines = [
        f"# {evaluation.recipe}",
        "",
        f"`{evaluation.bundle}` ({evaluation.size_bytes / 1e6:,.1f} MB): {state}",
        "",
    ]
    if evaluation.baseline is not None:
        lines += [f"Baseline: `{evaluation.baseline.name}`", ""]
    if evaluation.limit is not None:
        lines += [f"At most {evaluation.limit} questions of a task, and windows of a text.", ""]
    lines += ["| measure | value | 95 % interval | baseline |", "|---|--:|--:|--:|"]
    lines += [f"| {' | '.join(row)} |" for row in measures(evaluation)]
    if evaluation.checks:
        lines += ["", "| threshold | found | demanded | |", "|---|--:|--:|---|"]
        for check in sorted(evaluation.checks, key=lambda check: check.passed):
            mark = "holds" if check.passed else "**does not hold**"
            lines.append(f"| {check.name} | {check.found:.6g} | {check.bound} {check.limit:g} | {mark} |")
    if evaluation.seconds is not None:
        lines += ["", f"The tasks took {evaluation.seconds:.1f} s."]
    return "\n".join(lines) + "\n"


def _predicted(predictions: Predictions, with_perplexity: bool) -> list[tuple[str, str, str, str]]:
    where = f"{predictions.text}, {predictions.windows} x {predictions.length} tokens"
    other = predictions.baseline_perplexity
    rows = []
    if with_perplexity:
        shown = "" if other is None else f"{other:.3f}"
        rows.append((f"perplexity ({where})", *_shown(predictions.perplexity, "{:.3f}"), shown))
    for name, figure, form in (
        ("mean KL, nats a token", predictions.mean_kl, "{:.5f}"),
        ("p99 KL", predictions.p99_kl, "{:.5f}"),
        ("same most likely token", predictions.same_top1, "{:.2%}"),
    ):
        if figure is not None:
            rows.append((name, *_shown(figure, form), ""))
    return rows


def _shown(figure: Figure, form: str) -> tuple[str, str]:
    interval = "" if figure.low is None else f"{form.format(figure.low)} to {form.format(figure.high)}"
    return form.format(figure.value), interval


def _task_interval(task: TaskScore) -> str:
    if task.stderr is None:
        return ""
    low, high = task.score - _Z95 * task.stderr, task.score + _Z95 * task.stderr
    return f"{low:.4f} to {high:.4f}"

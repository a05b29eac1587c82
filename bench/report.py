"""Tables of a run: for a terminal, and as docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from bench.columns import COLUMNS, Column
from bench.engines import NAMES, OURS
from bench.models import GROUP_SIZE, MODELS
from bench.results import EngineResult, Run, ratio

_ABSENT = "–"
_DISTURBED = "~"

INTRODUCTION = f"""\
# Benchmarks

Our CPU runtime beside its peers: one run, one machine, the same weights, token ids and threads. `make bench` measures
anew and rewrites this page.

Every engine runs alone in a fresh process. After a warm-up each figure is the median of several samples; with
`--processes` engines take turns in several processes each, and the best median counts. Prompts are
English text (for random weights: random ids), each sequence its own; nothing is reused between prompts. "decode xN" is
N sequences decoding together, all their tokens counted, from the step in which the last of them got its first token on;
prompts have the length stated, and {COLUMNS["decode-1"].tokens} tokens are generated. "ratio" is ours to the best
peer: above 1 is better than every peer, also where less is better. The limit of a prefill is the time of the linears'
multiply-adds at the measured int8 peak and of attention's, which are of 16 bits, at half of it; that of a decode step
is the longer of reading weights (INT4 in groups of {GROUP_SIZE}, the head INT8, into which InferenceX unpacks the
INT6 that it stores), keys and values (16 bits) once at the measured bandwidth, and the linears' multiply-adds. That of
memory is the weights and the keys and values of the column that has most of them, that of the disk the weights as
they are stored.
The first token is that of a prompt of {COLUMNS["first-token"].context} tokens; the memory is the peak of the process
that measured all else.
"""


def number(value: float) -> str:
    """Three significant digits where they matter, never an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def header(results: dict[str, EngineResult]) -> list[str]:
    """The engines that have results, in the order of the table, and the columns that compare."""
    return [
        "",
        *(f"{name} ({results[name].precision})" for name in _present(results)),
        "ratio",
        "limit",
        "of the limit",
    ]


def rows(run: Run, model_name: str) -> Iterable[list[str]]:
    """One row a measurement: title and unit, a figure for each engine, ratio, limit, our fraction of it."""
    results = run.models[model_name]
    for column in COLUMNS.values():
        if not any(column.name in result.figures for result in results.values()):
            continue
        limit = column.limit(MODELS[model_name], run.limits)
        times = ratio(column, results)
        ours = results[OURS].figures.get(column.name) if OURS in results else None
        yield [
            f"{column.title}, {column.unit}",
            *(_figure(results[name], column) for name in _present(results)),
            _ABSENT if times is None else f"{times:.2f}x",
            _ABSENT if limit is None else number(limit),
            _ABSENT if limit is None or ours is None else f"{_share_of(limit, ours.value, column):.0%}",
        ]


def _share_of(limit: float, value: float, column: Column) -> float:
    return value / limit if column.higher_is_better else limit / value


def _present(results: dict[str, EngineResult]) -> list[str]:
    return [name for name in NAMES if name in results]


def _figure(result: EngineResult, column: Column) -> str:
    figure = result.figures.get(column.name)
    if figure is None:
        return _ABSENT
    return number(figure.value) + (_DISTURBED if figure.disturbed else "")


def terminal_table(run: Run, model_name: str) -> Table:
    """Return the table of one model."""
    table = Table(title=MODELS[model_name].title)
    for place, title in enumerate(header(run.models[model_name])):
        table.add_column(title, justify="left" if place == 0 else "right")
    for row in rows(run, model_name):
        table.add_row(*row)
    return table


def notes(run: Run) -> list[str]:
    """Sentences on the machine, on what is absent and on what is to be doubted."""
    limits = run.limits
    lines = [
        f"{run.date}, {run.machine}, {run.threads} threads, {run.software}.",
        f"Measured limits: {limits.int8_operations_per_second / 1e12:.2f} TOPS of int8 ({limits.instructions}), "
        f"{limits.bytes_per_second / 1e9:.1f} GB/s of memory reads.",
    ]
    lines += [f"{name} was left out: {reason}" for name, reason in run.skipped.items()]
    failures = [
        f"{engine} on {model} did not finish: {result.failure}"
        for model, results in run.models.items()
        for engine, result in results.items()
        if result.failure is not None
    ]
    doubtful = any(
        figure.disturbed
        for results in run.models.values()
        for result in results.values()
        for figure in result.figures.values()
    )
    mark = [f"{_DISTURBED} marks figures that were taken while other processes used the machine."] if doubtful else []
    return lines + failures + mark


def markdown(run: Run) -> str:
    """Return docs/benchmarks.md."""
    parts = [INTRODUCTION, f"Command: `{run.command}`\n", "\n".join(f"- {line}" for line in notes(run)) + "\n"]
    for model_name, results in run.models.items():
        titles = header(results)
        table = [titles, ["---"] + ["---:"] * (len(titles) - 1), *rows(run, model_name)]
        parts.append(f"## {MODELS[model_name].title}\n")
        parts.append("\n".join("| " + " | ".join(row) + " |" for row in table) + "\n")
    engines = {name: results[name] for results in run.models.values() for name in _present(results)}
    parts.append("## How each engine is set up\n")
    table = [["engine", "version", "set-up"], ["---"] * 3]
    table += [[name, result.version, result.settings] for name, result in engines.items()]
    parts.append("\n".join("| " + " | ".join(row) + " |" for row in table) + "\n")
    return "\n".join(parts)

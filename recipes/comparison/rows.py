"""What a comparison shows of each bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from inferencex.recipes.comparison.speed import Speed


@dataclass(frozen=True)
class Row:
    """Figures of one bundle against the reference; what was not measured is None.

    KL in nats per token, `same_top1` a share, `scores` by task; `passed`: whether the recipe's thresholds hold.
    """

    bundle: str
    size_bytes: int
    tokens: int = 0
    mean_kl: float | None = None
    p99_kl: float | None = None
    same_top1: float | None = None
    perplexity: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    speed: Speed | None = None
    passed: bool | None = None

    @property
    def prefill(self) -> float | None:
        """Prompt tokens per second."""
        return None if self.speed is None else self.speed.prefill_tokens_per_second

    @property
    def decode(self) -> float | None:
        """Generated tokens per second."""
        return None if self.speed is None else self.speed.decode_tokens_per_second

    def to_json(self) -> dict[str, Any]:
        """Return the figures by name."""
        return asdict(self)


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return a header and a line of texts for each row, without the columns that no row has anything in."""
    tasks = list(dict.fromkeys(name for row in rows for name in row.scores))
    columns: dict[str, list[str]] = {
        "bundle": [row.bundle for row in rows],
        "MB": [f"{row.size_bytes / 1e6:,.1f}" for row in rows],
        "tokens": [str(row.tokens) if row.tokens else "" for row in rows],
        "mean KL": [_shown(row.mean_kl, ".4f") for row in rows],
        "p99 KL": [_shown(row.p99_kl, ".4f") for row in rows],
        "same top-1": [_shown(row.same_top1, ".1%") for row in rows],
        "perplexity": [_shown(row.perplexity, ".2f") for row in rows],
    }
    for task in tasks:
        columns[task] = [_shown(row.scores.get(task), ".4f") for row in rows]
    columns["prefill tok/s"] = [_shown(row.prefill, ",.0f") for row in rows]
    columns["decode tok/s"] = [_shown(row.decode, ",.1f") for row in rows]
    columns["thresholds"] = [{None: "", True: "hold", False: "missed"}[row.passed] for row in rows]
    shown = {name: values for name, values in columns.items() if any(values)}
    return list(shown), [list(line) for line in zip(*shown.values(), strict=True)]


def markdown(rows: Sequence[Row], plots: Sequence[str]) -> str:
    """Return the table, and the plots that are beside it."""
    header, lines = cells(rows)
    out = ["# Comparison", "", f"Against `{rows[0].bundle}`.", "", f"| {' | '.join(header)} |"]
    out.append("|---|" + "--:|" * (len(header) - 1))
    out += [f"| {' | '.join(line)} |" for line in lines]
    for plot in plots:
        out += ["", f"![{plot.removesuffix('.svg')}]({plot})"]
    return "\n".join(out) + "\n"


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)

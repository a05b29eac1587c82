"""What a run found, as it is kept, compared and printed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.columns import COLUMNS, Column
from bench.engines import OURS
from bench.limits import Limits
from bench.sampling import Figure


@dataclass
class EngineResult:
    """One engine on one model. `failure` is what ended it early, None if nothing did."""

    version: str
    precision: str
    settings: str
    figures: dict[str, Figure] = field(default_factory=dict)
    failure: str | None = None

    def take_better(self, again: EngineResult) -> None:
        """Take each figure of another process in which the engine was measured that is better than what is here."""
        self.failure = self.failure or again.failure
        for name, figure in again.figures.items():
            here = self.figures.get(name)
            if here is None or COLUMNS[name].is_better(figure.value, here.value):
                self.figures[name] = figure


@dataclass
class Run:
    """One run. `models` maps a model's name and then an engine's to its result; `skipped` says why one is absent."""

    date: str
    command: str
    machine: str
    software: str
    threads: int
    limits: Limits
    models: dict[str, dict[str, EngineResult]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read what `save` wrote."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields["limits"] = Limits(**fields["limits"])
        fields["models"] = {
            model: {
                engine: EngineResult(
                    **{
                        **result,
                        "figures": {name: Figure(**figure) for name, figure in result["figures"].items()},
                    }
                )
                for engine, result in engines.items()
            }
            for model, engines in fields["models"].items()
        }
        return cls(**fields)

    def complete_from(self, earlier: Run) -> None:
        """Take from an earlier run whatever this one did not measure."""
        for model, engines in earlier.models.items():
            for engine, before in engines.items():
                now = self.models.setdefault(model, {}).setdefault(engine, before)
                now.figures = {**before.figures, **now.figures}


@dataclass(frozen=True)
class BestPeer:
    """The peer with the best figure of a column."""

    engine: str
    value: float


def best_peer(column: Column, results: Mapping[str, EngineResult]) -> BestPeer | None:
    """Return the best peer in a column; None when no peer has a figure."""
    candidates = [
        BestPeer(engine, result.figures[column.name].value)
        for engine, result in results.items()
        if engine != OURS and column.name in result.figures
    ]
    if not candidates:
        return None
    choose = max if column.higher_is_better else min
    return choose(candidates, key=lambda candidate: candidate.value)


def ratio(column: Column, results: Mapping[str, EngineResult]) -> float | None:
    """How many times better than the best peer we are: above 1 is better, whichever way the column counts."""
    best = best_peer(column, results)
    ours = results[OURS].figures.get(column.name) if OURS in results else None
    if best is None or ours is None or not ours.value or not best.value:
        return None
    return ours.value / best.value if column.higher_is_better else best.value / ours.value

"""`report.json` and `report.md`: what a conversion did, what it cost, and what it changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from inferencex.convert.fidelity import Fidelity
from inferencex.convert.pack import PackedWeight
from inferencex.convert.passes import Optimized


@dataclass
class Report:
    """Everything measured while a bundle was made; `seconds` by stage, sizes in bytes."""

    model: str
    scheme: str
    seconds: dict[str, float] = field(default_factory=dict)
    peak_memory: int = 0
    source_bytes: int = 0
    bundle_bytes: int = 0
    weights: list[PackedWeight] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    graph: Optimized | None = None
    fidelity: Fidelity | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        graph = self.graph
        return {
            "model": self.model,
            "scheme": self.scheme,
            "seconds": {stage: round(value, 3) for stage, value in self.seconds.items()},
            "peak_memory_bytes": self.peak_memory,
            "source_bytes": self.source_bytes,
            "bundle_bytes": self.bundle_bytes,
            "weights": [asdict(weight) for weight in self.weights],
            "notes": self.notes,
            "warnings": self.warnings,
            "graph": {}
            if graph is None
            else {"before": graph.ops_before, "after": graph.ops_after, "rewrites": graph.rewrites},
            "fidelity": None if self.fidelity is None else self.fidelity.to_json(),
        }

    def to_markdown(self) -> str:
        """Return the report for people."""
        lines = [f"# {self.model}, {self.scheme}", ""]
        lines += self._summary()
        if self.fidelity is not None:
            lines += ["", "## Against the source", "", *self._fidelity(self.fidelity)]
        lines += ["", "## Weights", "", *_formats(self.weights)]
        worst = sorted((w for w in self.weights if w.relative_error), key=lambda w: -w.relative_error)[:10]
        if worst:
            lines += [
                "",
                "Largest relative errors:",
                "",
                "| weight | shape | format | relative error |",
                "|---|---|---|---|",
            ]
            lines += [f"| `{w.name}` | {list(w.shape)} | {w.format} | {w.relative_error:.4f} |" for w in worst]
        if self.graph is not None:
            lines += ["", "## Graph", "", *_graph(self.graph)]
        for title, texts in (("Notes", self.notes), ("Warnings", self.warnings)):
            if texts:
                lines += ["", f"## {title}", "", *(f"- {text}" for text in texts)]
        return "\n".join(lines) + "\n"

    def _summary(self) -> list[str]:
        total = sum(self.seconds.values())
        stages = ", ".join(f"{stage} {value:.1f} s" for stage, value in self.seconds.items())
        return [
            f"- size: {size(self.source_bytes)} -> {size(self.bundle_bytes)}",
            f"- time: {total:.1f} s ({stages})",
            f"- peak memory: {size(self.peak_memory)}",
        ]

    @staticmethod
    def _fidelity(f: Fidelity) -> list[str]:
        return [
            f"Over {f.tokens} tokens of text, the bundle read back from disk against the model it was made from:",
            "",
            "| mean KL | max KL | same top-1 | perplexity of source | of bundle |",
            "|---|---|---|---|---|",
            f"| {f.mean_kl:.3g} | {f.max_kl:.3g} | {f.same_top1:.1%} | {f.source_perplexity:.2f} "
            f"| {f.bundle_perplexity:.2f} |",
        ]


def size(count: float) -> str:
    """Write a number of bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def _formats(weights: Sequence[PackedWeight]) -> list[str]:
    counts: Counter[tuple[str, str]] = Counter()
    elements: Counter[tuple[str, str]] = Counter()
    for weight in weights:
        counts[(weight.role, weight.format)] += 1
        elements[(weight.role, weight.format)] += weight.parameters
    rows = [
        f"| {role} | {kind} | {count} | {elements[(role, kind)]:,} |" for (role, kind), count in sorted(counts.items())
    ]
    return ["| role | format | tensors | parameters |", "|---|---|---|---|", *rows]


def _graph(graph: Optimized) -> list[str]:
    names: Mapping[str, None] = dict.fromkeys([*graph.ops_after, *graph.ops_before])
    rows = [f"| {name} | {graph.ops_before.get(name, 0)} | {graph.ops_after.get(name, 0)} |" for name in names]
    rewrites = [f"| {name} | {count} |" for name, count in graph.rewrites.items()]
    return [
        "| operator | captured | after passes |",
        "|---|---|---|",
        *rows,
        "",
        "| pass | applied |",
        "|---|---|",
        *rewrites,
    ]

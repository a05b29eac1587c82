"""`report.json` and `report.md`: what a conversion did, what it cost, and what it changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from inferencex.convert.fidelity import Fidelity
from inferencex.convert.held_out import HeldOutFidelity
from inferencex.convert.kv_cache import KVLayerReport, kv_cache_json, kv_cache_table
from inferencex.convert.layer_report import LayerReport, bits_per_weight, error_plot, layer_tables
from inferencex.convert.mixed_report import mixed_lines
from inferencex.convert.pack import PackedWeight
from inferencex.convert.passes import Optimized
from inferencex.formats.bundle.layout import PLOT_FILE


@dataclass
class Report:
    """Everything measured while a bundle was made.

    seconds:      wall time by stage
    peak_memory, source_bytes, bundle_bytes:  in bytes
    weights:      every stored weight
    layers:       every weight that was quantized with calibration, in the order of the model
    calibration:  the text that was used for it, as in `bundle.json`
    fidelity:     the bundle against its source on a short text, always
    held_out:     the same on text that calibration did not see
    kv_cache:     the keys and values of every layer, where those have calibrated scales
    refinement:   what `--effort best` learned: mean KL on held-out text before and after, and its course
    mixed:        the budget that formats were chosen for, how sensitive weights are, and what was predicted
    """

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
    layers: list[LayerReport] = field(default_factory=list)
    calibration: dict[str, Any] | None = None
    held_out: HeldOutFidelity | None = None
    kv_cache: list[KVLayerReport] = field(default_factory=list)
    refinement: dict[str, Any] | None = None
    mixed: dict[str, Any] | None = None

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
            "layers": [asdict(layer) for layer in self.layers],
            "bits_per_weight": bits_per_weight(self.layers) if self.layers else None,
            "calibration": self.calibration,
            "held_out": None if self.held_out is None else self.held_out.to_json(),
            "kv_cache": kv_cache_json(self.kv_cache),
            "refinement": self.refinement,
            "mixed": self.mixed,
        }

    def to_markdown(self) -> str:
        """Return the report for people."""
        lines = [f"# {self.model}, {self.scheme}", ""]
        lines += self._summary()
        if self.fidelity is not None:
            lines += ["", "## Against the source", "", *self._fidelity(self.fidelity)]
        if self.held_out is not None:
            lines += ["", "## On text held out from calibration", "", *_held_out(self.held_out)]
        if self.calibration is not None:
            lines += ["", "## Calibration", "", *_calibration(self.calibration)]
        if self.mixed is not None:
            lines += ["", "## Mixed precision", "", *mixed_lines(self.mixed)]
        if self.layers:
            lines += ["", "## Layers", ""]
            if self.refinement is not None:
                lines += ["Errors are those before refinement, which learns from all outputs together.", ""]
            if self.to_plot() is not None:
                lines += [f"![relative output error by block]({PLOT_FILE})", ""]
            lines += layer_tables(self.layers)
        if self.kv_cache:
            lines += ["", "## KV cache", "", *kv_cache_table(self.kv_cache)]
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

    def to_plot(self) -> str | None:
        """Return the plot of the layers' errors as SVG, None when none was measured."""
        return error_plot(self.layers, f"{self.model}, {self.scheme}")

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


def _held_out(h: HeldOutFidelity) -> list[str]:
    return [
        f"Over {h.windows} windows of {h.length} tokens of the text that calibration was taken from, none of them used "
        f"for it. The bundle ran on the backend `{h.backend}` with {h.activation_dtype} activations and a KV cache in "
        f"{h.kv_cache_dtype}:",
        "",
        "| mean KL | p99 KL | same top-1 | perplexity of source | of bundle |",
        "|---|---|---|---|---|",
        f"| {h.mean_kl:.4g} | {h.p99_kl:.4g} | {h.same_top1:.1%} | {h.source_perplexity:.2f} "
        f"| {h.bundle_perplexity:.2f} |",
    ]


def _calibration(source: Mapping[str, Any]) -> list[str]:
    files = [f"`{file['name']}`" for file in source.get("files", ())]
    return [
        f"- text: {', '.join(files) if files else '`' + str(source.get('name')) + '`'} ({source.get('kind')})",
        f"- samples: {source.get('samples')} of {source.get('length')} tokens, seed {source.get('seed')}",
        f"- sha256 of the token ids: `{source.get('sha256')}`",
    ]


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

"""README.md of a published folder: what the model is, how it was made, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferencex.recipes.provenance.checksums import SUMS_FILE
from inferencex.recipes.provenance.statement import STATEMENT_FILE, Origin

CARD_FILE = "README.md"
_LABELS = {
    "mean_kl": "mean KL from the source (nats per token)",
    "p99_kl": "99th percentile of the KL",
    "same_top1": "same most likely token",
    "source_perplexity": "perplexity of the source",
    "bundle_perplexity": "perplexity",
    "tokens": "tokens",
}
_TEXTS = {"fidelity": "A short text", "held_out": "Text held out from calibration"}


def model_card(
    origin: Origin, artifact: str, facts: Mapping[str, Any], gates: Mapping[str, Mapping[str, Any]], bom: str
) -> str:
    """Return the card.

    facts:  figures of the conversion: bytes, source_bytes, fidelity, held_out
    gates:  of each gate that was passed, its figures by name
    bom:    file of the bill of materials
    """
    title = origin.model.rstrip("/").rpartition("/")[2]
    lines = ["---", f"base_model: {_yaml(origin.model)}", "library_name: inferencex", "pipeline_tag: text-generation"]
    lines += ["tags:", "- inferencex", f"- {_yaml(artifact)}", "---", "", f"# {title}, {origin.conversion}", ""]
    what = "A bundle for InferenceX" if artifact == "bundle" else f"An export of InferenceX in the format {artifact}"
    lines += [f"{what}, made from `{origin.model}`.", ""]
    if artifact == "bundle":
        lines += ["    inferencex run FOLDER --prompt 'Once upon a time'", ""]
    lines += ["## How it was made", "", "| | |", "|---|---|"]
    lines += [f"| source | `{origin.model}` |"]
    if origin.revision is not None:
        lines += [f"| revision | `{origin.revision}` |"]
    lines += [f"| recipe | {origin.recipe}, sha256 `{origin.recipe_digest}` |"]
    lines += [f"| {name} | `{value}` |" for name, value in sorted(origin.options.items())]
    lines += [f"| {name} | {version} |" for name, version in sorted(origin.tools.items())]
    lines += ["", "## What was measured", "", "| | |", "|---|---|"]
    lines += [f"| size | {_size(facts['bytes'])} of {_size(facts['source_bytes'])} |"]
    for kind, text in _TEXTS.items():
        figures = facts.get(kind) or {}
        lines += [f"| {text}: {_LABELS.get(name, name)} | {_number(figures[name])} |" for name in figures]
    for gate, figures in sorted(gates.items()):
        lines += [f"| {gate}: {name} | {_number(value)} |" for name, value in sorted(figures.items())]
    lines += ["", "## Is it what was published?", "", "    inferencex verify FOLDER", ""]
    lines += [f"`{SUMS_FILE}` has the hashes of all files, `{STATEMENT_FILE}` says what they were made from, and"]
    lines += [f"`{bom}` is the bill of materials (CycloneDX 1.6)."]
    return "\n".join(lines) + "\n"


def _yaml(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _size(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

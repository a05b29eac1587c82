"""What a run found: figures row by row, kept in a file that a later run goes on with, and how ours compare."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.accuracy.tools import NAMES, OURS
from bench.accuracy.tools.base import Activations

BITS_TOLERANCE = 0.05
"""Formats whose bits per weight differ by no more than this count as equal."""


@dataclass(frozen=True)
class Finding:
    """One row's figures.

    tool, row, scheme, activations, floats:  see `Row`
    version:           of the tool
    bits:              per weight of the decoder's linears, scales and zero points included
    perplexity:        of the text
    mean_kl, p99_kl:   KL(source || quantized) in nats per token
    same_top1:         share of positions at which both find the same token most likely
    seconds:           of the conversion, from the start of its process to its end
    cpu_seconds:       of the conversion, over all its threads and processes: less at the mercy of what else runs
    peak_memory:       of that process, in bytes
    """

    tool: str
    row: str
    scheme: str
    activations: Activations
    floats: bool
    version: str
    bits: float
    perplexity: float
    mean_kl: float
    p99_kl: float
    same_top1: float
    seconds: float
    cpu_seconds: float
    peak_memory: int


@dataclass
class Run:
    """One table. `settings` are what all rows share; `skipped` and `failures` say why a tool or a row is not there.

    `findings` has rows by "TOOL/ROW"; `source_perplexity` is that of the float32 source.
    """

    model: str
    date: str
    command: str
    machine: str
    software: str
    settings: dict[str, str | int]
    source_perplexity: float
    findings: dict[str, Finding] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write as JSON; an interruption leaves the file as it was or as it is to be."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read what `save` wrote."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        findings = {name: Finding(**finding) for name, finding in fields.pop("findings").items()}
        return cls(findings=findings, **fields)

    def ordered(self) -> list[Finding]:
        """Return the rows by how activations are read, then by whole bits, then from best to worst."""
        kinds: Sequence[Activations] = ("float32", "int8", "fp8")
        return sorted(
            self.findings.values(),
            key=lambda found: (kinds.index(found.activations), int(found.bits), found.mean_kl),
        )


def best_peer(ours: Finding, findings: Iterable[Finding]) -> Finding | None:
    """Return the peers' row of lowest mean KL that takes no more bits than `ours`; None when there is none.

    Both read activations alike, and both have integers, or both floats, for weights.
    """
    rivals = [
        found
        for found in findings
        if found.tool != OURS
        and found.activations == ours.activations
        and found.floats == ours.floats
        and found.bits <= ours.bits + BITS_TOLERANCE
    ]
    return min(rivals, key=lambda found: found.mean_kl, default=None)


def chosen_rows(only: str | None, known: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Read `--only`: tools, or rows as TOOL/ROW, separated by commas; `ours` is `inferencex`. None is everything.

    Returns the rows by tool in the order of the table; raises ValueError naming what there is none of.
    """
    if only is None:
        return {tool: list(rows) for tool, rows in known.items()}
    wanted: dict[str, list[str]] = {tool: [] for tool in NAMES if tool in known}
    for name in filter(None, (part.strip() for part in only.split(","))):
        tool, _, row = name.partition("/")
        tool = OURS if tool == "ours" else tool
        if tool not in known or (row and row not in known[tool]):
            choices = [*known, *(f"{tool}/{row}" for tool, rows in known.items() for row in rows)]
            raise ValueError(f"{name!r} is not one of {', '.join(choices)}")
        wanted[tool] += [row] if row else list(known[tool])
    return {tool: [row for row in known[tool] if row in rows] for tool, rows in wanted.items() if rows}

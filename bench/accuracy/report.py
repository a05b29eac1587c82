"""docs/accuracy.md, and the table on a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from bench.accuracy.results import BITS_TOLERANCE, Finding, Run, best_peer
from bench.accuracy.tools import NAMES, OURS, find_tool

TITLES = ("tool", "method and format", "bits", "perplexity", "mean KL", "p99 KL", "same top-1", "s", "CPU s", "MB")
_ABSENT = "–"

INTRODUCTION = """\
# Accuracy

How far quantized models are from their source: our methods and those of our peers, at equal bits, in one harness.
`make accuracy` measures anew and rewrites this page.

Every tool begins from the same checkpoint in bfloat16, quantizes all linears of the decoder and neither embedding nor
head, and calibrates on the same token ids. Then its model runs in float32 on windows of a text that none of them
calibrated on: KL is KL(source || quantized) in nats per token over the whole vocabulary, its mean and its 99th
percentile over all tokens; "same top-1" is the share of tokens after which both find the same token most likely;
perplexity is of each window on its own. Where activations are quantized, they are before every linear of the decoder.
Bits are those that a linear's weight takes in what the tool wrote, scales and zero points included. Seconds are those
of the conversion, from the start of its process to its end, reading the checkpoint and writing the result included;
CPU s is the processor time that all its threads took; MB is the peak resident memory of that process. What peers write
as checkpoints or GGUF files is read back by `convert/source` and run by transformers; NNCF's graph is run by OpenVINO,
and our bundles by our CPU backend.
"""


def cells(found: Finding) -> list[str]:
    """One row of the table, under `TITLES`."""
    return [
        found.tool,
        found.scheme,
        f"{found.bits:.2f}",
        f"{found.perplexity:.2f}",
        figure(found.mean_kl),
        figure(found.p99_kl),
        f"{found.same_top1:.1%}",
        f"{found.seconds:.0f}",
        f"{found.cpu_seconds:.0f}",
        f"{found.peak_memory / 1e6:,.0f}",
    ]


def figure(value: float) -> str:
    """A divergence with three significant digits, never as an exponent."""
    return f"{value:.3f}" if value >= 0.1 else f"{value:.4f}" if value >= 0.01 else f"{value:.5f}"


def comparisons(run: Run) -> Iterable[list[str]]:
    """For each row of ours: the best peer at equal bits, and how many times lower its KL and its time are than ours."""
    for ours in run.ordered():
        if ours.tool != OURS:
            continue
        peer = best_peer(ours, run.findings.values())
        if peer is None:
            yield [ours.scheme, f"{ours.bits:.2f}", figure(ours.mean_kl), *[_ABSENT] * 5]
            continue
        yield [
            ours.scheme,
            f"{ours.bits:.2f}",
            figure(ours.mean_kl),
            f"{peer.tool}, {peer.scheme}",
            f"{peer.bits:.2f}",
            figure(peer.mean_kl),
            f"{peer.mean_kl / ours.mean_kl:.2f}x" if ours.mean_kl else _ABSENT,
            f"{peer.seconds / ours.seconds:.2f}x",
        ]


def terminal_table(run: Run) -> Table:
    """Return all rows."""
    table = Table(title=run.model)
    for place, title in enumerate(TITLES):
        table.add_column(title, justify="left" if place < 2 else "right")
    for found in run.ordered():
        table.add_row(*cells(found))
    return table


def notes(run: Run) -> list[str]:
    """Sentences on machine, settings, and on what is absent."""
    settings = ", ".join(f"{name} {value}" for name, value in run.settings.items())
    lines = [
        f"{run.date}, {run.machine}, {run.software}.",
        f"{settings}.",
        f"The source's perplexity is {run.source_perplexity:.3f}.",
    ]
    lines += [f"{tool} was left out: {reason}" for tool, reason in run.skipped.items()]
    return lines + [f"{name} did not finish: {reason}" for name, reason in run.failures.items()]


def markdown(run: Run, plot: str) -> str:
    """Return docs/accuracy.md, which shows the picture `plot`, a path beside it."""
    parts = [INTRODUCTION, f"Command: `{run.command}`\n", "\n".join(f"- {line}" for line in notes(run)) + "\n"]
    parts.append(f"## {run.model}\n")
    rows = []
    for found in run.ordered():
        texts = cells(found)
        rows.append([f"**{text}**" for text in texts] if found.tool == OURS else texts)
    parts.append(_table(TITLES, 2, rows))
    parts.append(f"![Mean KL against bits per weight]({plot})\n")
    parts.append("## Ours beside the best peer\n")
    parts.append(
        f"The best peer is the one of lowest KL that takes no more bits (within {BITS_TOLERANCE}) and reads "
        "activations as ours does, integers beside integers and floats beside floats. Above 1x ours is better.\n"
    )
    titles = ("ours", "bits", "mean KL", "best peer", "bits", "mean KL", "KL", "time")
    parts.append(_table(titles, 1, list(comparisons(run))))
    parts.append("## How each tool is set up\n")
    versions = {found.tool: found.version for found in run.findings.values()}
    set_up = [[name, versions[name], find_tool(name).settings] for name in NAMES if name in versions]
    parts.append(_table(("tool", "version", "set-up"), 3, set_up))
    return "\n".join(parts)


def _table(titles: Iterable[str], left: int, rows: Iterable[list[str]]) -> str:
    head = list(titles)
    lines = [head, ["---"] * left + ["---:"] * (len(head) - left), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"

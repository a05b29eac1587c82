"""Tables of a run: for a terminal, and as docs/serving-benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from bench.engines import OURS
from bench.report import number
from bench.serve.results import Run, Served, spread
from bench.serve.servers import SERVERS

_ABSENT = "–"
_MODES = {True: "streamed", False: "not streamed"}
HEADER = (
    "",
    "output tokens/s",
    "ours is",
    "first token p50 / p99, ms",
    "between tokens p50 / p99, ms",
    "whole answer p50, s",
)

INTRODUCTION = """\
# Serving benchmarks

Our server beside the servers of peers, and beside our engine without a server: one run, one machine, the same weights
and threads. `make bench-serve` measures anew and rewrites this page. What the engines do without a server is in
[benchmarks.md](benchmarks.md).

Each server runs alone in a fresh process, the load generator of `inferencex bench serve` on the same processors. Every
prompt is of random words of its own, so that no cache helps; every answer has its full length, decoded greedily. A wave
of requests goes before each measurement; figures are those of the repetition with the median throughput. "ours is"
compares throughput, streamed with streamed. The engine without a server gets all requests at once, from tokens to
text, and computes as many sequences at a time.
"""


def rows(run: Run) -> Iterable[list[str]]:
    """One row for the engine without a server, and one a server and way of answering."""
    if run.offline_rate is not None:
        of = ", ".join(f"{share:.0%} {_MODES[mode]}" for mode in _MODES if (share := run.of_offline(mode)) is not None)
        yield ["our engine without a server", number(run.offline_rate), of or _ABSENT, *[_ABSENT] * 3]
    for name in SERVERS:
        if name not in run.servers:
            continue
        for stream, mode in _MODES.items():
            served = run.servers[name].median(stream)
            if served is not None:
                times = None if name == OURS else run.times(name, stream)
                yield [
                    f"{name} ({run.servers[name].precision}), {mode}",
                    number(served.output_tokens_per_second),
                    _ABSENT if times is None else f"{times:.2f}x",
                    _pair(served.first_token_p50, served.first_token_p99),
                    _pair(served.gap_p50, served.gap_p99),
                    number(served.latency_p50),
                ]


def _pair(median: float | None, high: float | None) -> str:
    return _ABSENT if median is None or high is None else f"{number(1e3 * median)} / {number(1e3 * high)}"


def terminal_table(run: Run) -> Table:
    """Return the table."""
    table = Table(title=f"{run.model}: {_load(run)}")
    for place, title in enumerate(HEADER):
        table.add_column(title, justify="right" if place else "left")
    for row in rows(run):
        table.add_row(*row)
    return table


def notes(run: Run) -> list[str]:
    """Sentences on the machine, on what is absent and on what is to be doubted."""
    lines = [f"{run.date}, {run.machine}, {run.load.threads} threads, {run.software}.", f"{_load(run)}."]
    ours = run.servers.get(OURS)
    for stream, mode in _MODES.items():
        share = run.of_offline(stream)
        if share is not None:
            lines.append(f"Through our server, {mode}, {share:.0%} of the engine's own throughput is left.")
    if ours is not None and ours.served:
        most = max(served.client_share for served in ours.served)
        lines.append(f"The load generator took up to {most:.0%} of one processor from our server.")
    for name, result in run.servers.items():
        lines += _odd_lengths(run, name, result.served)
        if result.failure is not None:
            lines.append(f"{name} did not finish: {result.failure}")
    lines += [f"{name} was left out: {reason}" for name, reason in run.skipped.items()]
    if run.offline:
        lines.append(f"Repetitions without a server lie {spread(run.offline):.0%} apart.")
    return lines


def _odd_lengths(run: Run, name: str, served: list[Served]) -> list[str]:
    """Say where a server counted other lengths than were asked for."""
    asked = (run.load.prompt_tokens, run.load.output_tokens)
    found = {(round(each.prompt_tokens, 1), round(each.output_tokens, 1)) for each in served}
    return [
        f"{name} counted {prompt:g} tokens of a prompt and {output:g} of an answer on average."
        for prompt, output in sorted(found - {asked})
    ]


def _load(run: Run) -> str:
    load = run.load
    return (
        f"{load.requests} requests, {load.concurrency} at a time, {load.prompt_tokens} tokens in and "
        f"{load.output_tokens} out, up to {load.repeat} repetitions"
    )


def markdown(run: Run) -> str:
    """Return docs/serving-benchmarks.md."""
    table = [list(HEADER), ["---"] + ["---:"] * (len(HEADER) - 1), *rows(run)]
    setup = [["server", "version", "set-up"], ["---"] * 3]
    setup += [[name, result.version, result.settings] for name, result in run.servers.items()]
    parts = [
        INTRODUCTION,
        f"Command: `{run.command}`\n",
        "\n".join(f"- {line}" for line in notes(run)) + "\n",
        f"## {run.model}\n",
        "\n".join("| " + " | ".join(row) + " |" for row in table) + "\n",
        "## How each server is set up\n",
        "\n".join("| " + " | ".join(row) + " |" for row in setup) + "\n",
    ]
    return "\n".join(parts)

"""What is printed of the results, and `results.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from inferencex.runtime.load_test.records import RequestRecord
from inferencex.runtime.load_test.statistics import Distribution, Result

FORMAT = 1  # of results.json
_BUSY = 0.5  # part of a processor beyond which the load generator may have slowed what it measured
_LATE = 0.05  # seconds
_ABSENT = "–"


def latency_table(result: Result) -> Table:
    """Return the percentiles of one measurement, in milliseconds."""
    table = Table(title=f"{result.load.label}: latencies in ms", title_justify="left")
    for place, name in enumerate(("", "mean", "p50", "p90", "p95", "p99", "max")):
        table.add_column(name, justify="right" if place else "left")
    for title, times in (
        ("time to first token", result.time_to_first_token),
        ("inter-token latency", result.inter_token_latency),
        ("time per output token", result.time_per_output_token),
        ("end to end", result.latency),
    ):
        if times is not None:
            table.add_row(title, *map(_milliseconds, _columns(times)))
    return table


def summary_lines(result: Result) -> list[str]:
    """Return throughput, goodput, errors, and what makes the figures doubtful, a line each."""
    lines = [
        f"{result.completed} of {result.requests} requests completed in {result.seconds:.2f} s, "
        f"up to {result.peak} at a time",
        f"{result.requests_per_second:.2f} requests/s, {result.output_tokens_per_second:.1f} output tokens/s, "
        f"{result.total_tokens_per_second:.1f} tokens/s with prompts",
    ]
    if result.goodput is not None and result.good is not None:
        share = result.good / result.requests if result.requests else 0.0
        lines.append(f"goodput: {result.goodput:.2f} requests/s kept to all objectives, {share:.1%} of all")
    lines += [f"failed, {kind}: {count} ({result.examples[kind]})" for kind, count in result.errors.items()]
    tokens = result.prompt_tokens and result.output_tokens
    if tokens and result.seconds > 0:
        lines.append(
            f"load generator: {result.client_seconds / result.seconds:.1%} of a processor, "
            f"{1e6 * result.client_seconds / result.output_tokens:.1f} µs an output token"
        )
    return lines + [f"note: {note}" for note in _doubts(result)]


def _doubts(result: Result) -> list[str]:
    notes = []
    if result.seconds > 0 and result.client_seconds / result.seconds > _BUSY:
        notes.append("the load generator was busy itself, which may have slowed what it measured")
    if result.load.rate is not None and result.load.concurrency is None and result.late and result.late.p99 > _LATE:
        notes.append(f"1 % of the requests were sent {1e3 * result.late.p99:.0f} ms or more after they were due")
    if result.inter_token_latency is not None and result.inter_token_latency.p50 == 0:
        notes.append(
            "most tokens arrived together with the one before; the time per output token says more than their gaps"
        )
    if result.uncounted:
        notes.append(
            f"the server counted no tokens of {result.uncounted} answers; they are missing from tokens/s "
            "(--ignore-eos or --stream makes them known)"
        )
    return notes


def sweep_table(results: Sequence[Result]) -> Table:
    """Return one line for each of several measurements; latencies in milliseconds."""
    table = Table(title="Sweep: latencies in ms", title_justify="left")
    names = ("load", "requests/s", "output tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "E2E p50", "failed")
    for place, name in enumerate((*names, *(("goodput",) if results[0].good is not None else ()))):
        table.add_column(name, justify="right" if place else "left")
    for result in results:
        cells = [result.load.label, f"{result.requests_per_second:.2f}", f"{result.output_tokens_per_second:.1f}"]
        for times in (result.time_to_first_token, result.inter_token_latency):
            cells += [_ABSENT] * 2 if times is None else [_milliseconds(times.p50), _milliseconds(times.p99)]
        cells.append(_ABSENT if result.latency is None else _milliseconds(result.latency.p50))
        cells.append(str(sum(result.errors.values())))
        if result.goodput is not None:
            cells.append(f"{result.goodput:.2f}")
        table.add_row(*cells)
    return table


def results_json(
    settings: Mapping[str, Any], results: Sequence[Result], records: Sequence[Sequence[RequestRecord]]
) -> str:
    """Return `results.json`: settings, every measurement, and every request of it. Times are in seconds."""
    measurements = []
    for result, requests in zip(results, records, strict=True):
        origin = min((record.sent for record in requests), default=0.0)
        measurements.append(
            {
                **asdict(result),
                "requests_per_second": result.requests_per_second,
                "output_tokens_per_second": result.output_tokens_per_second,
                "total_tokens_per_second": result.total_tokens_per_second,
                "goodput": result.goodput,
                "records": [_record(record, origin) for record in requests],
            }
        )
    return json.dumps({"format": FORMAT, **settings, "measurements": measurements}, indent=1) + "\n"


def _record(record: RequestRecord, origin: float) -> dict[str, Any]:
    return {
        "due": round(record.due - origin, 6),
        "sent": round(record.sent - origin, 6),
        "time_to_first_token": record.time_to_first_token,
        "time_per_output_token": record.time_per_output_token,
        "latency": record.latency,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "events": len(record.arrivals),
        "finish_reason": record.finish_reason,
        "error": record.error,
        "message": record.message,
    }


def _columns(times: Distribution) -> tuple[float, ...]:
    return times.mean, times.p50, times.p90, times.p95, times.p99, times.maximum


def _milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:.{0 if value >= 1000 else 1 if value >= 10 else 2}f}" if math.isfinite(value) else _ABSENT

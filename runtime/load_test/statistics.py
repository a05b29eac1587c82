"""What a measurement comes to: percentiles, throughput, errors by kind, goodput."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from inferencex.runtime.load_test.objectives import Objective
from inferencex.runtime.load_test.records import RequestRecord
from inferencex.runtime.load_test.run import Measurement

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Distribution:
    """A set of times in seconds. Percentiles between two of them are interpolated linearly, as numpy does."""

    count: int
    mean: float
    minimum: float
    p50: float
    p90: float
    p95: float
    p99: float
    maximum: float


def distribution(values: Iterable[float | None]) -> Distribution | None:
    """Summarize the values that are there; None when none is."""
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    if not known.size:
        return None
    p50, p90, p95, p99 = (float(value) for value in np.percentile(known, PERCENTILES))
    return Distribution(known.size, float(known.mean()), float(known.min()), p50, p90, p95, p99, float(known.max()))


@dataclass(frozen=True)
class Load:
    """What was offered: requests a second (None: as many as `concurrency` allows), and most at a time (None: any)."""

    rate: float | None
    concurrency: int | None

    @property
    def label(self) -> str:
        """A few words for tables and plots."""
        parts = [] if self.rate is None else [f"{self.rate:g} requests/s"]
        parts += [] if self.concurrency is None else [f"{self.concurrency} at a time"]
        return ", ".join(parts)


@dataclass(frozen=True)
class Result:
    """What one measurement came to; times in seconds, throughput of the requests that completed.

    seconds:         from the first request's sending to the last one's end
    peak:            most requests under way at once
    errors:          how many failed, by kind; `examples` has the message of the first of each kind
    uncounted:       completed requests whose output tokens nobody knows: throughput in tokens leaves them out
    good:            completed requests that kept to all objectives; None where there are none
    late:            how long after it was due a request was sent
    client_seconds:  processor time of the load generator itself
    """

    load: Load
    requests: int
    completed: int
    errors: dict[str, int]
    examples: dict[str, str]
    seconds: float
    peak: int
    prompt_tokens: int
    output_tokens: int
    uncounted: int
    time_to_first_token: Distribution | None
    inter_token_latency: Distribution | None
    time_per_output_token: Distribution | None
    latency: Distribution | None
    late: Distribution | None
    good: int | None
    client_seconds: float

    @property
    def requests_per_second(self) -> float:
        """Completed requests a second."""
        return self._per_second(self.completed)

    @property
    def output_tokens_per_second(self) -> float:
        """Tokens of answers a second."""
        return self._per_second(self.output_tokens)

    @property
    def total_tokens_per_second(self) -> float:
        """Tokens of prompts and answers a second."""
        return self._per_second(self.prompt_tokens + self.output_tokens)

    @property
    def goodput(self) -> float | None:
        """Requests a second that kept to all objectives; None where there are none."""
        return None if self.good is None else self._per_second(self.good)

    def _per_second(self, count: int) -> float:
        return count / self.seconds if self.seconds > 0 else 0.0


def summarize(load: Load, measurement: Measurement, objectives: Sequence[Objective]) -> Result:
    """Return what a measurement comes to."""
    records = measurement.records
    done = [record for record in records if record.ok]
    errors = Counter(record.error for record in records if record.error is not None)
    examples: dict[str, str] = {}
    for record in records:
        if record.error is not None:
            examples.setdefault(record.error, record.message or "")
    return Result(
        load=load,
        requests=len(records),
        completed=len(done),
        errors=dict(errors.most_common()),
        examples=examples,
        seconds=measurement.ended - measurement.began,
        peak=measurement.peak,
        prompt_tokens=sum(record.prompt_tokens or 0 for record in done),
        output_tokens=sum(record.output_tokens or 0 for record in done),
        uncounted=sum(record.output_tokens is None for record in done),
        time_to_first_token=distribution(record.time_to_first_token for record in done),
        inter_token_latency=distribution(gap for record in done for gap in record.inter_token_latencies),
        time_per_output_token=distribution(record.time_per_output_token for record in done),
        latency=distribution(record.latency for record in done),
        late=distribution(record.sent - record.due for record in records),
        good=_good(done, objectives) if objectives else None,
        client_seconds=measurement.cpu_seconds,
    )


def _good(records: Sequence[RequestRecord], objectives: Sequence[Objective]) -> int:
    return sum(all(objective.holds(record) for objective in objectives) for record in records)

"""What a run found, as it is kept, compared and printed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.engines import OURS
from bench.serve.load import Load


@dataclass(frozen=True)
class Served:
    """One repetition of the load on a server. Times in seconds, tokens a request on average.

    client_share: processors that the load generator took of those that the server had
    """

    stream: bool
    output_tokens_per_second: float
    prompt_tokens: float
    output_tokens: float
    first_token_p50: float | None
    first_token_p99: float | None
    gap_p50: float | None
    gap_p99: float | None
    latency_p50: float
    client_share: float


@dataclass
class ServerResult:
    """One server. `failure` is what ended it early, None if nothing did."""

    version: str
    precision: str
    settings: str
    served: list[Served] = field(default_factory=list)
    failure: str | None = None

    def median(self, stream: bool) -> Served | None:
        """Return the repetition with the median throughput (the lower of two in the middle); None without any."""
        ordered = sorted(
            (served for served in self.served if served.stream == stream),
            key=lambda served: served.output_tokens_per_second,
        )
        return ordered[(len(ordered) - 1) // 2] if ordered else None


@dataclass
class Run:
    """One run. `offline` has generated tokens a second of our engine without a server, one for each repetition."""

    date: str
    command: str
    machine: str
    software: str
    model: str
    load: Load
    offline: list[float] = field(default_factory=list)
    servers: dict[str, ServerResult] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def offline_rate(self) -> float | None:
        """The median of the repetitions; None when it was not measured."""
        return statistics.median(self.offline) if self.offline else None

    def of_offline(self, stream: bool) -> float | None:
        """Part of our engine's own throughput that is left through our server; None where one was not measured."""
        ours, offline = self._rate(OURS, stream), self.offline_rate
        return None if ours is None or not offline else ours / offline

    def times(self, peer: str, stream: bool) -> float | None:
        """How many times a peer's throughput ours is; None where one was not measured."""
        ours, theirs = self._rate(OURS, stream), self._rate(peer, stream)
        return None if ours is None or not theirs else ours / theirs

    def _rate(self, server: str, stream: bool) -> float | None:
        median = self.servers[server].median(stream) if server in self.servers else None
        return None if median is None else median.output_tokens_per_second

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def load_from(cls, path: Path) -> Run:
        """Read what `save` wrote."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields["load"] = Load(**fields["load"])
        fields["servers"] = {
            name: ServerResult(**{**result, "served": [Served(**served) for served in result["served"]]})
            for name, result in fields["servers"].items()
        }
        return cls(**fields)


def spread(values: Sequence[float]) -> float:
    """Return the distance between the highest and the lowest value, as a part of their median."""
    return (max(values) - min(values)) / statistics.median(values) if values else 0.0

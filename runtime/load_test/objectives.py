"""Service level objectives: what a request has to keep to, to count as goodput."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from inferencex.formats.errors import OptionError
from inferencex.runtime.load_test.records import RequestRecord

_NAMES = ("ttft", "itl", "tpot", "e2e")
_UNITS = {"ms": 1e-3, "s": 1.0, "us": 1e-6, "": 1e-3}
_GAPS = 0.95  # of a request's inter-token latencies, which its objective holds for


@dataclass(frozen=True)
class Objective:
    """One limit: `name` of what, and at most how many seconds.

    ttft: to the first token; tpot: mean a token after it; itl: 95 % of the gaps between tokens; e2e: the whole answer
    """

    name: str
    seconds: float

    def holds(self, record: RequestRecord) -> bool:
        """Whether a completed request kept to it; one that has no such time, as it was not streamed, did not."""
        value: float | None
        if self.name == "ttft":
            value = record.time_to_first_token
        elif self.name == "tpot":
            value = 0.0 if record.output_tokens == 1 and record.arrivals else record.time_per_output_token
        elif self.name == "itl":
            gaps = record.inter_token_latencies
            value = float(np.quantile(gaps, _GAPS)) if gaps else 0.0 if record.arrivals else None
        else:
            value = record.latency
        return value is not None and value <= self.seconds


def parse_objectives(text: str, stream: bool) -> tuple[Objective, ...]:
    """Read the value of `--slo`, such as `ttft:500ms,itl:50ms`; a number without a unit is milliseconds."""
    objectives = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([a-z0-9]+)\s*[:=]\s*([0-9]*\.?[0-9]+)\s*(ms|us|s|)\s*", part)
        if match is None or match[1] not in _NAMES or float(match[2]) <= 0:
            raise OptionError(
                f"--slo {text}: {part.strip()!r} is no objective; expected one of {', '.join(_NAMES)} with a time, "
                "such as ttft:500ms,itl:50ms"
            )
        if not stream and match[1] != "e2e":
            raise OptionError(f"--slo {text}: {match[1]} is known of streamed answers alone; leave out --no-stream")
        objectives.append(Objective(match[1], float(match[2]) * _UNITS[match[3]]))
    return tuple(objectives)

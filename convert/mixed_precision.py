"""Formats weight by weight under a budget: what is possible, what is chosen, and whether the result keeps to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from inferencex.convert.calibrate.sensitivity import Candidate, Sensitivities
from inferencex.convert.layer_report import LayerReport
from inferencex.convert.quantize import QuantizationScheme, TensorPlan, TensorScheme, WeightInfo, plan_quantization
from inferencex.convert.quantize.budget import Allocation, Budget, FormatChoices, Option
from inferencex.formats.errors import OptionError, QuantizationError

ROUNDS = 3
"""Conversions at most, until one keeps to the budget."""

_HALF = 2  # bytes of a scale, as they nearly always are
_GRAPH_BYTES = 600  # by which what the graph says of a weight may grow with another format
_CLOSE = 0.9  # of --max-kl: a result above that is not made smaller
_MARGIN = 0.97  # of --max-kl: what a corrected prediction aims at


@dataclass(frozen=True)
class Attempt:
    """One conversion under a budget.

    bits:            mean bits of the weights whose format was chosen, as stored
    bundle_bytes:    of the whole bundle
    predicted_kl:    by the sensitivities alone
    expected_kl:     the same, corrected by what earlier attempts measured
    measured_kl:     on held-out text; None where nothing was measured
    """

    bits: float
    bundle_bytes: int
    predicted_kl: float
    expected_kl: float
    measured_kl: float | None


@dataclass(frozen=True)
class Verdict:
    """What to do with an attempt: whether it keeps to the budget, and whether it is the last."""

    fits: bool
    is_last: bool


class MixedPrecision:
    """Chooses formats for the linears and experts of a model, and judges what comes of them.

    other_bytes: what a bundle takes beside the weights whose format is chosen, about. Raises OptionError for a budget
    that no choice keeps to.

    remark: what a user should know of the budget; None where it is nothing
    """

    def __init__(
        self, roles: Sequence[WeightInfo], scheme: QuantizationScheme, budget: Budget, other_bytes: int
    ) -> None:
        self.budget, self._other = budget, other_bytes
        self._plans = [plan_quantization(roles, replace(scheme, linear=one)) for one in scheme.candidates]
        self._free = {
            plan.name: place
            for place, plan in enumerate(self._plans[0])
            if plan.scheme is not None and plan.is_stored and plan.role in ("linear", "experts")
        }
        if not self._free:
            raise OptionError(f"{budget}: the model has no weights whose format could be chosen; leave it out")
        self._parameters = sum(math.prod(self._plans[0][place].shape) for place in self._free.values())
        self.remark: str | None = None
        self._refuse_impossible()
        self.attempts: list[Attempt] = []
        self._tried: list[Allocation] = []
        self._ratio = 1.0
        self._excess = 0
        self.sensitivities: Sensitivities = {}

    @property
    def schemes(self) -> dict[str, list[TensorScheme]]:
        """The schemes that each weight may have, fitted to its shape."""
        found: dict[str, list[TensorScheme]] = {name: [] for name in self._free}
        for plans in self._plans:
            for name, place in self._free.items():
                scheme = plans[place].scheme
                assert scheme is not None
                found[name].append(scheme)
        return found

    @property
    def largest_plans(self) -> list[TensorPlan]:
        """Plans with the largest candidate for every weight, of which nothing that is chosen takes more."""
        return self._plans[-1]

    def _refuse_impossible(self) -> None:
        sizes = [sum(plans[p].stored_bytes(0, _HALF) for p in self._free.values()) for plans in self._plans]
        low, high = min(sizes), max(sizes)
        other = 0 if self.budget.kind == "bits" else self._other
        limit = self._bytes_of_bits(self.budget.limit) if self.budget.kind == "bits" else self.budget.limit
        if self.budget.kind != "kl" and limit >= high + other:
            self.remark = f"{self.budget} is no limit: the most that formats take is " + (
                f"{8 * high / self._parameters:.3f} bits a weight"
                if self.budget.kind == "bits"
                else f"about {(high + other) / 1e6:.1f} MB"
            )
        if self.budget.kind == "bits" and self._bytes_of_bits(self.budget.limit) < low:
            raise OptionError(
                f"{self.budget} is less than any choice of formats takes: from {8 * low / self._parameters:.3f} to "
                f"{8 * high / self._parameters:.3f} bits are possible with {self._names()}"
            )
        if self.budget.kind == "size" and self.budget.limit < low + self._other:
            raise OptionError(
                f"{self.budget} is less than any choice of formats takes: bundles of about "
                f"{(low + self._other) / 1e6:.1f} to {(high + self._other) / 1e6:.1f} MB are possible with "
                f"{self._names()}, {self._other / 1e6:.1f} MB of which are what is not chosen (embedding, norms, "
                "tokenizer); --embedding and --lm-head make that smaller"
            )

    def _names(self) -> str:
        first = next(iter(self._free.values()))
        return ", ".join(scheme.type for plans in self._plans if (scheme := plans[first].scheme) is not None)

    def _bytes_of_bits(self, bits: float) -> int:
        return math.floor(bits * self._parameters / 8)

    def choose(self, sensitivities: Sensitivities) -> None:
        """Take the sensitivities, and choose for the first attempt. Raises OptionError."""
        self.sensitivities = sensitivities
        options = {n: [Option(c.nbytes, c.rise) for c in candidates] for n, candidates in sensitivities.items()}
        self._choices = FormatChoices(options)
        self._current = self._next()

    def _next(self) -> Allocation:
        choices, limit = self._choices, self.budget.limit
        if self.budget.kind == "kl":
            margin = _MARGIN if self.attempts else 1.0
            return choices.within_rise(margin * limit / self._ratio) or choices.best
        nbytes = self._bytes_of_bits(limit) if self.budget.kind == "bits" else int(limit) - self._other
        found = choices.within_bytes(nbytes - self._excess)
        if found is None:
            raise OptionError(
                f"{self.budget} is less than any choice of formats takes: the smallest has "
                f"{8 * choices.smallest / self._parameters:.3f} bits a weight, {choices.smallest / 1e6:.1f} MB"
            )
        return found

    @property
    def plans(self) -> list[TensorPlan]:
        """What happens to every weight in the attempt that comes now."""
        plans = list(self._plans[0])
        for name, index in self._current.chosen.items():
            place = self._free[name]
            plans[place] = replace(self._plans[index][place], reason=f"chosen for {self.budget}")
        return plans

    def judge(self, layers: Sequence[LayerReport], bundle_bytes: int, measured_kl: float | None) -> Verdict:
        """Say whether the attempt keeps to the budget, and choose for the next if there should be one.

        `layers` are its calibrated weights. Raises QuantizationError when no attempt can keep to it.
        """
        stored = sum(round(x.bits_per_weight * math.prod(x.shape) / 8) for x in layers if x.name in self._free)
        expected = self._current.rise * self._ratio
        self.attempts.append(
            Attempt(8 * stored / self._parameters, bundle_bytes, self._current.rise, expected, measured_kl)
        )
        self._tried.append(self._current)
        if self.budget.kind == "kl":
            assert measured_kl is not None, "a limit of the KL divergence takes a measurement"
            return self._judge_divergence(measured_kl)
        limit = self._bytes_of_bits(self.budget.limit) if self.budget.kind == "bits" else int(self.budget.limit)
        excess = (stored if self.budget.kind == "bits" else bundle_bytes) - limit
        if excess <= 0:
            return Verdict(fits=True, is_last=True)
        if len(self.attempts) == ROUNDS:
            raise QuantizationError(
                f"{self.budget}: after {ROUNDS} conversions the bundle still has {excess} bytes too many "
                f"({self.attempts[-1].bits:.3f} bits a weight, {bundle_bytes} bytes); give a larger budget"
            )
        if self.budget.kind == "bits":
            self._excess += excess
        else:
            self._other = bundle_bytes - stored + _GRAPH_BYTES * len(self._free)
        self._current = self._next()
        return Verdict(fits=False, is_last=False)

    def _judge_divergence(self, measured: float) -> Verdict:
        limit, predicted = self.budget.limit, self._current.rise
        fits = measured <= limit
        kept = [tried for tried, a in zip(self._tried, self.attempts, strict=True) if _measured(a) <= limit]
        if not fits and not kept and self._current == self._choices.best:
            raise QuantizationError(
                f"{self.budget} cannot be reached: with the most accurate formats there are "
                f"({self.attempts[-1].bits:.3f} bits a weight) the mean KL on held-out text is {measured:.4g} nats per "
                "token; raise the limit, or keep some weights plain with --exclude"
            )
        if fits and (measured >= _CLOSE * limit or self._current.nbytes == self._choices.smallest):
            return Verdict(fits, is_last=True)
        if len(self.attempts) == ROUNDS:
            if not kept:
                raise QuantizationError(
                    f"{self.budget} was not reached in {ROUNDS} conversions, the last of which has {measured:.4g} at "
                    f"{self.attempts[-1].bits:.3f} bits a weight; raise the limit, or state --target-bits"
                )
            return Verdict(fits, is_last=True)
        self._ratio = measured / predicted if predicted > 0 and measured > 0 else 1.0
        following = self._next()
        if following in self._tried or (kept and following.nbytes >= min(tried.nbytes for tried in kept)):
            if kept:
                return Verdict(fits, is_last=True)
            following = self._choices.best
        self._current = following
        return Verdict(fits, is_last=False)

    def summary(self, attempt: int, layers: Sequence[LayerReport]) -> dict[str, Any]:
        """Return what the report says of an attempt: its formats, how sensitive the weights are, predictions."""
        chosen, made = self._tried[attempt], self.attempts[attempt]
        schemes = {name: self.sensitivities[name][index] for name, index in chosen.chosen.items()}
        shapes = {name: self._plans[0][place].shape for name, place in self._free.items()}
        formats: dict[str, dict[str, Any]] = {}
        for name, candidate in schemes.items():
            entry = formats.setdefault(str(candidate.scheme), {"weights": 0, "parameters": 0, "bytes": 0})
            entry["weights"] += 1
            entry["parameters"] += math.prod(shapes[name])
            entry["bytes"] += candidate.nbytes
        order = sorted(self.sensitivities, key=lambda name: -_densest(self.sensitivities[name], shapes[name]))
        return {
            "budget": {"kind": self.budget.kind, "limit": self.budget.limit, "option": str(self.budget)},
            "bits": made.bits,
            "bundle_bytes": made.bundle_bytes,
            "predicted_kl": made.predicted_kl,
            "expected_kl": made.expected_kl,
            "measured_kl": made.measured_kl,
            "attempts": [asdict(one) for one in self.attempts],
            "formats": dict(sorted(formats.items())),
            "weights": [
                {
                    "name": name,
                    "format": str(schemes[name].scheme),
                    "rises": {c.scheme.type: c.rise for c in self.sensitivities[name]},
                }
                for name in order
            ],
        }


def _measured(attempt: Attempt) -> float:
    return math.inf if attempt.measured_kl is None else attempt.measured_kl


def _densest(candidates: Sequence[Candidate], shape: tuple[int, ...]) -> float:
    """Return how much a weight's smallest format costs for each of its parameters."""
    return max(candidate.rise for candidate in candidates) / math.prod(shape)

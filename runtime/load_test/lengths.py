"""How long prompts and answers are: one number, or a distribution to draw from."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Protocol

from inferencex.formats.errors import OptionError

FORMS = "N, uniform:LOW:HIGH, normal:MEAN:DEVIATION or lognormal:MEDIAN:SIGMA"
LONGEST = 1 << 24  # tokens; a draw of a wide distribution is cut off here


class Lengths(Protocol):
    """A distribution of lengths in tokens; as text it is what `parse_lengths` reads."""

    def draw(self, source: random.Random) -> int:
        """Return a length from 1 to `LONGEST`."""
        ...


@dataclass(frozen=True)
class Uniform:
    """Every length from `low` to `high`, both included, is as likely. ValueError for bounds that are none."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high <= LONGEST:
            raise ValueError(f"lengths are whole numbers from 1 to {LONGEST}, the lower one first")

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"uniform:{self.low}:{self.high}"

    def draw(self, source: random.Random) -> int:
        """Return a length."""
        return source.randint(self.low, self.high)


@dataclass(frozen=True)
class Normal:
    """A normal distribution, rounded and cut off. ValueError for a mean or a deviation out of range."""

    mean: float
    deviation: float

    def __post_init__(self) -> None:
        _check_center(self.mean, self.deviation)

    def __str__(self) -> str:
        return f"normal:{self.mean:g}:{self.deviation:g}"

    def draw(self, source: random.Random) -> int:
        """Return a length."""
        return min(max(1, round(source.gauss(self.mean, self.deviation))), LONGEST)


@dataclass(frozen=True)
class LogNormal:
    """Half of the lengths are above `median`, with a long tail; `sigma` is the deviation of their logarithm.

    ValueError for a median or a sigma out of range.
    """

    median: float
    sigma: float

    def __post_init__(self) -> None:
        _check_center(self.median, self.sigma)

    def __str__(self) -> str:
        return f"lognormal:{self.median:g}:{self.sigma:g}"

    def draw(self, source: random.Random) -> int:
        """Return a length."""
        logarithm = source.gauss(math.log(self.median), self.sigma)
        return max(1, round(math.exp(min(logarithm, math.log(LONGEST)))))


def _check_center(center: float, spread: float) -> None:
    if not (1 <= center <= LONGEST and 0 <= spread < math.inf):
        raise ValueError(f"the centre is from 1 to {LONGEST} tokens, and the spread 0 or more")


def parse_lengths(option: str, text: str) -> Lengths:
    """Read the value of an option; OptionError, naming the option, for one that says no distribution."""
    name, *values = text.strip().split(":")
    try:
        if not values:
            return Uniform(int(name), int(name))
        if len(values) == 2 and name == "uniform":
            return Uniform(int(values[0]), int(values[1]))
        if len(values) == 2 and name in ("normal", "lognormal"):
            kind = Normal if name == "normal" else LogNormal
            return kind(float(values[0]), float(values[1]))
    except ValueError as error:
        raise OptionError(f"{option} {text}: {error}; expected {FORMS}") from error
    raise OptionError(f"{option} {text}: is no distribution of lengths; expected {FORMS}")

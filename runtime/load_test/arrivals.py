"""When requests are sent: after random gaps, after equal ones, or whenever there is room."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from inferencex.formats.errors import OptionError


def poisson(rate: float, source: random.Random) -> Iterator[float]:
    """Yield arrival times in seconds from the start, `rate` a second on average, as independent users make them."""
    time = 0.0
    while True:
        yield time
        time += source.expovariate(rate)


def evenly(rate: float) -> Iterator[float]:
    """Yield arrival times in seconds from the start, `rate` a second, all gaps equal."""
    number = 0
    while True:
        yield number / rate
        number += 1


def parse_rates(text: str) -> list[float]:
    """Read the value of `--rate`: requests a second, or `inf`, or several of them separated by commas."""
    rates = []
    for part in text.split(","):
        try:
            rate = float(part)
        except ValueError:
            rate = math.nan
        if not rate > 0:
            raise OptionError(f"--rate {text}: {part.strip()!r} is not a number above 0; expected such as 4, or inf")
        rates.append(rate)
    return rates


def parse_concurrencies(text: str) -> list[int]:
    """Read the value of `--concurrency`: a number of requests, or several separated by commas."""
    numbers = []
    for part in text.split(","):
        try:
            number = int(part)
        except ValueError:
            number = 0
        if number < 1:
            raise OptionError(f"--concurrency {text}: {part.strip()!r} is not a whole number above 0; such as 1,8,32")
        numbers.append(number)
    return numbers

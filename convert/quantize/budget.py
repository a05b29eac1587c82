"""Choosing a format for every weight: the best predictions within so many bytes, or the fewest bytes within an error.

A multiple-choice knapsack problem, solved by dynamic programming over bytes. The errors of weights are taken to add up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from inferencex.formats.errors import OptionError

_STEPS = (
    1 << 16
)  # into which the range from the smallest choice to the largest is divided, unless bytes divide it coarser

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>(?:[kmg]i?)?)b?", re.IGNORECASE)


@dataclass(frozen=True)
class Budget:
    """What a mixture of formats has to keep to.

    kind:   `bits`: mean bits of the weights whose format is chosen, scales and zero points included; `size`: bytes of
            the whole bundle on disk; `kl`: mean KL divergence from the source on held-out text, nats per token
    limit:  the most of it
    """

    kind: Literal["bits", "size", "kl"]
    limit: float

    def __str__(self) -> str:
        if self.kind == "size":
            return f"--target-size {int(self.limit)}"
        return f"--{'target-bits' if self.kind == 'bits' else 'max-kl'} {self.limit:g}"


def parse_budget(
    *, target_bits: float | None = None, target_size: str | None = None, max_kl: float | None = None
) -> Budget | None:
    """Read the options that state a budget, of which there may be one; None when there is none.

    A size is a number of bytes, with or without a unit: `80MB`, `1.5 GiB`. Raises OptionError.
    """
    options = {"--target-bits": target_bits, "--target-size": target_size, "--max-kl": max_kl}
    given = [option for option, value in options.items() if value is not None]
    if len(given) > 1:
        raise OptionError(f"{' and '.join(given)} are different budgets; give one of them")
    if target_size is not None:
        match = _SIZE.fullmatch(target_size.strip())
        nbytes = float(match["number"]) * _UNITS[match["unit"].lower()] if match else 0
        if nbytes < 1:
            raise OptionError(f"--target-size {target_size!r}: expected a size such as 80MB or 1.5GiB")
        return Budget("size", int(nbytes))
    for option, value in (("--target-bits", target_bits), ("--max-kl", max_kl)):
        if value is not None:
            if not (math.isfinite(value) and value > 0):
                raise OptionError(f"{option} {value}: expected a number above 0")
            return Budget("bits" if option == "--target-bits" else "kl", value)
    return None


@dataclass(frozen=True)
class Option:
    """One format that a weight may have.

    nbytes:  stored bytes
    rise:    what it adds to the error, 0 or more
    """

    nbytes: int
    rise: float


@dataclass(frozen=True)
class Allocation:
    """A choice for every weight.

    chosen:  by the name of the weight, the place of its option among those that were given
    nbytes:  bytes of all of them
    rise:    the sum of what they add to the error
    """

    chosen: dict[str, int]
    nbytes: int
    rise: float


class FormatChoices:
    """The best choices for weights whose options are known, for any budget.

    Of the options of a weight, those that are both larger and worse than another, or as large and no better, are never
    chosen. Sizes are rounded up to one part in 65,536 of their range, and the choice is the best one for the sizes so
    rounded: it never exceeds a budget, and more budget never makes it worse.
    """

    def __init__(self, options: Mapping[str, Sequence[Option]]) -> None:
        self._options = options
        self._kept = {name: undominated(given) for name, given in options.items()}
        smallest = {name: options[name][kept[0]].nbytes for name, kept in self._kept.items()}
        largest = {name: options[name][kept[-1]].nbytes for name, kept in self._kept.items()}
        self.smallest, self.largest = sum(smallest.values()), sum(largest.values())
        extra = {name: [options[name][i].nbytes - smallest[name] for i in kept] for name, kept in self._kept.items()}
        span = self.largest - self.smallest
        common = math.gcd(*(size for sizes in extra.values() for size in sizes)) or 1
        self._step = common if span // common <= _STEPS else -(-span // _STEPS)
        self._extra = {name: [-(-size // self._step) for size in sizes] for name, sizes in extra.items()}
        self._solve()

    def _solve(self) -> None:
        """Find, for every number of steps, the least error, and which option of each weight it takes."""
        places = sum(sizes[-1] for sizes in self._extra.values()) + 1
        best = np.zeros(places)
        self._choices: list[NDArray[np.int8]] = []
        for name, kept in self._kept.items():
            found = np.full(places, np.inf)
            choice = np.zeros(places, dtype=np.int8)
            for place, (index, size) in enumerate(zip(kept, self._extra[name], strict=True)):
                total = np.full(places, np.inf)
                total[size:] = best[: places - size] + self._options[name][index].rise
                better = total < found
                found[better], choice[better] = total[better], place
            best = found
            self._choices.append(choice)
        self._best = best

    def within_bytes(self, nbytes: int) -> Allocation | None:
        """Return the choice with the least error that takes no more than `nbytes`; None when none is as small."""
        if nbytes < self.smallest:
            return None
        return self._at(min((nbytes - self.smallest) // self._step, len(self._best) - 1))

    def within_rise(self, rise: float) -> Allocation | None:
        """Return the smallest choice whose error is no more than `rise`; None when none is as good."""
        enough = self._best <= rise
        return self._at(int(enough.argmax())) if enough.any() else None

    @property
    def best(self) -> Allocation:
        """The choice with the least error of all."""
        return self._at(len(self._best) - 1)

    def _at(self, steps: int) -> Allocation:
        chosen: dict[str, int] = {}
        for name, choice in zip(reversed(list(self._kept)), reversed(self._choices), strict=True):
            place = int(choice[steps])
            chosen[name] = self._kept[name][place]
            steps -= self._extra[name][place]
        ordered = {name: chosen[name] for name in self._kept}
        taken = [self._options[name][index] for name, index in ordered.items()]
        return Allocation(ordered, sum(o.nbytes for o in taken), math.fsum(o.rise for o in taken))


def undominated(options: Sequence[Option]) -> list[int]:
    """Return the places of the options that no other one beats, from the smallest to the largest."""
    kept: list[int] = []
    for index in sorted(range(len(options)), key=lambda i: (options[i].nbytes, options[i].rise, i)):
        if not kept or options[index].rise < options[kept[-1]].rise:
            kept.append(index)
    return kept

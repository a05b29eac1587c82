"""Repeating a measurement on a machine that others may use: samples taken while they computed are told apart."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DISTURBED = 0.1  # part of the machine that others took, beyond which a sample does not count
_STAT = Path("/proc/stat")
_POLL = 0.5  # seconds between looks at whether the machine is idle


@dataclass(frozen=True)
class Patience:
    """How long to try.

    repeat:   undisturbed samples wanted
    seconds:  after this long no further sample is begun
    idle:     longest wait, in seconds and for all samples together, for others to stop computing
    """

    repeat: int
    seconds: float
    idle: float = 0.0


@dataclass(frozen=True)
class Figure:
    """The median of the samples that count: the undisturbed ones, or all when there are none."""

    value: float
    samples: int
    disturbed: bool


class _Load:
    """Processor time that other processes take, from the kernel's counters; nothing where there are none."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._others = _others_seconds()

    def fraction(self) -> float:
        """Part of all processors that others took since this object was made."""
        if self._others is None:
            return 0.0
        now = _others_seconds()
        elapsed = max(time.monotonic() - self._began, 1e-9)
        return 0.0 if now is None else max(now - self._others, 0.0) / (elapsed * (os.cpu_count() or 1))


def _others_seconds() -> float | None:
    try:
        fields = _STAT.read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, fields[1:9])
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return busy - sum(os.times()[:4])


def wait_until_idle(seconds: float) -> float:
    """Wait, at most `seconds`, until others leave the machine alone; return how long that took."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        load = _Load()
        time.sleep(_POLL)
        if load.fraction() < DISTURBED / 2:
            break
    return time.monotonic() - began


def sample(take: Callable[[], float], patience: Patience) -> Figure:
    """Call `take` until enough undisturbed samples are there or time is up, at least once."""
    began = time.monotonic()
    left_idle = patience.idle
    kept: list[float] = []
    spoiled: list[float] = []
    while True:
        if left_idle > 0:
            waited = wait_until_idle(left_idle)
            left_idle -= waited
            began += waited
        load = _Load()
        value = take()
        (spoiled if load.fraction() > DISTURBED else kept).append(value)
        if len(kept) >= patience.repeat or len(kept) + len(spoiled) >= 4 * patience.repeat:
            break
        if time.monotonic() - began > patience.seconds:
            break
    chosen = kept or spoiled
    return Figure(statistics.median(chosen), len(chosen), not kept)

"""Choosing among configurations of a kernel by the clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import triton
from triton.runtime.errors import OutOfResources, PTXASError

from inferencex.formats.errors import BackendError
from inferencex.runtime.backends.triton.tuning.cache import TuningCache, current_cache
from inferencex.runtime.backends.triton.tuning.config import Config

Timer: TypeAlias = Callable[[Callable[[], Any]], float]
"""Returns the milliseconds that a call takes."""


def bucket_of(tokens: int) -> int:
    """Return the power of two that shape classes name a number of tokens by: the next one, up to 4096."""
    return min(1 << max(tokens - 1, 0).bit_length(), 4096)


def time_on_device(run: Callable[[], Any]) -> float:
    """Return the median of repeated runs in milliseconds, each with an empty second-level cache, as in a real step."""
    milliseconds = triton.testing.do_bench(run, warmup=10, rep=50, return_mode="median")
    assert isinstance(milliseconds, float)
    return milliseconds


@dataclass
class Tuner:
    """Measures configurations of kernels on the current device and keeps the fastest.

    cache: where they are kept; that of the current device when None
    timer: how long a run takes
    again: whether to measure what is kept already
    """

    cache: TuningCache | None = None
    timer: Timer = time_on_device
    again: bool = False
    chosen: dict[tuple[str, str], Config] = field(default_factory=dict)  # by kernel and shape class
    measured: dict[tuple[str, str], float] = field(default_factory=dict)  # milliseconds of what was chosen now

    def tune(
        self,
        kernel: str,
        shape_class: str,
        candidates: Sequence[Config],
        run: Callable[[Config], Any],
    ) -> Config:
        """Return the fastest candidate for a shape class: the kept one, or measured now unless it is there.

        With `again`, what is kept is measured anew, once by this tuner. `run(config)` launches the kernel once.
        Candidates that need more of the device than it has are passed over. Raises BackendError when none runs.
        """
        cache = current_cache() if self.cache is None else self.cache
        key = (kernel, shape_class)
        kept = cache.get(kernel, shape_class)
        if kept is None or kept not in candidates or (self.again and key not in self.measured):
            kept, self.measured[key] = self._fastest(kernel, shape_class, candidates, run)
            cache.put(kernel, shape_class, kept)
        self.chosen[key] = kept
        return kept

    def _fastest(
        self, kernel: str, shape_class: str, candidates: Sequence[Config], run: Callable[[Config], Any]
    ) -> tuple[Config, float]:
        best, least, tried = None, math.inf, 0
        for config in candidates:
            tried += 1
            try:
                milliseconds = self.timer(lambda config=config: run(config))  # type: ignore[misc]
            except (OutOfResources, PTXASError):
                continue
            if milliseconds < least:
                best, least = config, milliseconds
        if best is None:
            raise BackendError(
                f"none of {tried} configurations of {kernel} runs on this device for {shape_class}; "
                "each needs more shared memory or registers than it has"
            )
        return best, least

"""How much memory of a GPU the pool of layer state gets: what is left when weights and the largest step have theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from inferencex.formats.errors import BackendError, OptionError

_MARGIN = 64 << 20
"""Bytes that are left to the allocator's rounding."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a device, as seen when weights are loaded and a largest step has run.

    total:       what it has
    others:      what other processes, other models of this one, and the driver use
    weights:     what the bundle's weights take
    step:        what the values of the largest step took at once
    recordings:  what recorded decode steps may take
    sums:        what the sums of decode attention take, which depends on the pool: `with_sums`
    """

    total: int
    others: int
    weights: int
    step: int
    recordings: int
    sums: int = 0

    def with_sums(self, utilization: float, sums_of: Callable[[int], int]) -> DeviceMemory:
        """Count the sums of decode attention, whose bytes `sums_of` says for a pool of so many bytes.

        It is asked about all that is left without them, so that they are large enough for the pool that is left by
        them, which is smaller by less than a hundredth or two. Raises as `for_pool`.
        """
        return replace(self, sums=sums_of(self.for_pool(utilization)))

    def for_pool(self, utilization: float) -> int:
        """Return the bytes that the pool may take when all together may take `utilization` of the device.

        Raises OptionError for a share outside of (0, 1], and BackendError, with all numbers, when nothing is left.
        """
        if not 0 < utilization <= 1:
            raise OptionError(f"gpu_memory_utilization={utilization}; expected a share above 0 and at most 1")
        taken = self.others + self.weights + self.step + self.recordings + self.sums + _MARGIN
        left = int(self.total * utilization) - taken
        if left <= 0:
            raise BackendError(
                f"no memory is left for the KV cache: of {self.total / 1e9:.2f} GB, {utilization:.0%} may be used; "
                f"{self}. Lower max_num_batched_tokens or max_num_seqs, raise gpu_memory_utilization, or use a smaller "
                "quantization"
            )
        return left

    def __str__(self) -> str:
        parts = (
            ("weights", self.weights),
            ("the largest step", self.step),
            ("recorded decode steps", self.recordings),
            ("sums of decode attention", self.sums),
            ("other processes and the driver", self.others),
        )
        return ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in parts)

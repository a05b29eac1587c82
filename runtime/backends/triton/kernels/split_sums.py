"""Memory for what splits of keys leave until they are added up: reserved once, and used by one layer after another.

A split leaves, for each head, the sum of weighted values (`Dv` floats), the largest score and the sum of weights. Those
of a sequence lie behind each other, and a sequence's begin where those of the one before have ended at the latest,
after

    (keys_before + at * (SPLIT - 1)) // SPLIT

splits, where `keys_before` are the keys of the `at` sequences before it in the launch: rounding all of them up at once
leaves every one of them `ceil(context / SPLIT)` places. That holds for the splits of every layer, whatever their size,
and `keys` in `sequences` take no more than `(keys + sequences * (SPLIT - 1)) // SPLIT` places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inferencex.formats.errors import BackendError
from inferencex.runtime.backends.triton.attention_tiles import DecodeLimits

_ALIGNMENT = 32  # floats


@dataclass(frozen=True)
class SplitSums:
    """Memory for the sums of one launch at a time.

    memory: float32 [n], on the device
    limits: what a launch may take
    """

    memory: Tensor
    limits: DecodeLimits

    @classmethod
    def allocate(cls, floats: int, limits: DecodeLimits, device: torch.device) -> SplitSums:
        """Reserve memory of so many floats, the most that `floats_of` says of a layer."""
        return cls(torch.empty(floats, dtype=torch.float32, device=device), limits)

    def parts(self, heads: int, value_width: int, split: int, sequences: int) -> tuple[Tensor, Tensor]:
        """Return where a layer's launch leaves sums `[places, H, Dv]` and states `[places, H, 2]`.

        Raises BackendError for a launch that is too large, and for a layer that this was not reserved for.
        """
        needed = floats_of(heads, value_width, split, self.limits)
        if sequences > self.limits.sequences or needed > self.memory.numel():
            raise BackendError(
                f"decode attention of {sequences} sequences, {heads} heads of {value_width} and splits of {split} keys "
                f"takes {needed} floats for its sums; there are {self.memory.numel()}, for {self.limits.sequences} "
                "sequences and the splits that the model was loaded with. Load it again if it was tuned since"
            )
        places = places_of(self.limits, split)
        states = _aligned(places * heads * value_width)
        return (
            self.memory[: places * heads * value_width].view(places, heads, value_width),
            self.memory[states : states + places * heads * 2].view(places, heads, 2),
        )


def places_of(limits: DecodeLimits, split: int) -> int:
    """Return how many splits the keys of one launch can lie in."""
    return (limits.keys + limits.sequences * (split - 1)) // split


def floats_of(heads: int, value_width: int, split: int, limits: DecodeLimits) -> int:
    """Return the floats that one launch leaves at most."""
    places = places_of(limits, split)
    return _aligned(places * heads * value_width) + places * heads * 2


def _aligned(floats: int) -> int:
    return -(-floats // _ALIGNMENT) * _ALIGNMENT

"""Constraints written down token by token, for tests of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from inferencex.runtime.engine.constraint import mask_width


def bits(token_ids: Iterable[int], vocab_size: int) -> NDArray[np.int32]:
    """Return the mask of these tokens."""
    mask = np.zeros(mask_width(vocab_size), dtype=np.uint32)
    for token_id in token_ids:
        mask[token_id // 32] |= np.uint32(1 << token_id % 32)
    return mask.view(np.int32)


class Script:
    """Allows, token after token, what a list says; the output is complete at its end, or at the places of `stops`.

    loops: go on from the beginning instead of ending
    """

    def __init__(
        self, allowed: Sequence[Iterable[int]], vocab_size: int, stops: Sequence[int] = (), loops: bool = False
    ) -> None:
        self.allowed = [sorted(tokens) for tokens in allowed]
        self.vocab_size = vocab_size
        self.stops = stops
        self.loops = loops
        self.accepted: list[int] = []
        self.num_masks = 0

    @property
    def _place(self) -> int:
        return len(self.accepted) % len(self.allowed) if self.loops else len(self.accepted)

    @property
    def may_stop(self) -> bool:
        return self.finished or self._place in self.stops

    @property
    def finished(self) -> bool:
        return self._place == len(self.allowed)

    def fill_mask(self, mask: NDArray[np.int32]) -> bool:
        self.num_masks += 1
        if not self.allowed[self._place]:
            return False
        mask[:] = bits(self.allowed[self._place], self.vocab_size)
        return True

    def accept(self, token_id: int) -> None:
        allowed = self.allowed[self._place]
        assert not allowed or token_id in allowed
        self.accepted.append(token_id)

"""Which parts of a long text are looked at: windows all over it that never overlap, drawn by a seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Windows:
    """Where windows begin in a stream of tokens, ascending; no two overlap.

    calibration:  int64 [samples]
    held_out:     int64 [windows], in none of which there is a token of `calibration`
    """

    calibration: NDArray[np.int64]
    held_out: NDArray[np.int64]


def choose_windows(tokens: int, length: int, samples: int, held_out: int, seed: int) -> Windows:
    """Choose `samples` windows of `length` out of `tokens`, and of what is left up to `held_out` more.

    The text is cut into windows from a drawn offset on. One is drawn from each of `samples` equal parts of it, then one
    from each of `held_out` equal parts of the others. Needs `tokens >= samples * length`.
    """
    count = tokens // length
    generator = np.random.default_rng(seed)
    offset = int(generator.integers(0, tokens - count * length + 1))
    chosen = _one_of_each_part(np.arange(count), samples, generator)
    others = np.setdiff1d(np.arange(count), chosen)
    kept = _one_of_each_part(others, min(held_out, len(others)), generator)
    return Windows(offset + chosen * length, offset + kept * length)


def _one_of_each_part(items: NDArray[np.int64], parts: int, generator: np.random.Generator) -> NDArray[np.int64]:
    edges = np.arange(parts + 1) * len(items) // max(parts, 1)
    return items[generator.integers(edges[:-1], edges[1:])] if parts else items[:0]

"""Scales of keys and values: a range search over a histogram of magnitudes, one for each KV head.

A scale `s` keeps `x` as `s * r(clip(x / s, -m, m))` (see `Attention` of the dialect), so `m * s` is the largest
magnitude that is kept. It is searched between an eighth of the largest one observed and that one itself, for the least
sum of squared errors over what was observed. Magnitudes are counted in bins and stand in the middle of theirs: counts
are integers, so the result depends on nothing but the samples.
"""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferencex.formats.kv_cache import KV_LARGEST, KVFormat

BINS: Final = 4096
"""Bins between zero and the largest magnitude: 32 for each step of INT8 without clipping."""

_VANISHING: Final = 2.0**-100  # a head whose largest magnitude is below says nothing
_COARSE: Final = 2.0 ** (-np.arange(25) / 8.0)  # ranges, in parts of the largest magnitude
_FINE: Final = 2.0 ** (np.array([-7, -6, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 6, 7]) / 64.0)


def count_magnitudes(x: Tensor, largest: NDArray[np.float32]) -> NDArray[np.int64]:
    """Count the magnitudes of keys or values `x`, float32 `[T, G, D]`, by head: `[G, BINS]`.

    `largest [G]` is where the last bin of a head ends.
    """
    heads = x.shape[1]
    width = torch.from_numpy(np.maximum(largest, _VANISHING).astype(np.float32))[:, None]
    place = (x.abs() * (BINS / width)).to(torch.int32).clamp_(max=BINS - 1)
    place += (torch.arange(heads, dtype=torch.int32) * BINS)[:, None]
    counts: NDArray[np.int64] = torch.bincount(place.reshape(-1), minlength=heads * BINS).numpy()
    return counts.reshape(heads, BINS)


def search_scales(counts: NDArray[np.int64], largest: NDArray[np.float32], kind: KVFormat) -> NDArray[np.float32]:
    """Return the scale of each head, float32 `[G]`, that keeps what was counted with the least squared error.

    counts:   int64 `[G, BINS]`, from `count_magnitudes`
    largest:  float32 `[G]`; a head in which everything is zero gets the scale 1

    Of ranges with equal errors the largest is taken.
    """
    scales = [_search(of_head, float(peak), kind) for of_head, peak in zip(counts, largest, strict=True)]
    return np.array(scales, dtype=np.float32)


def range_error(
    middles: NDArray[np.floating[Any]], counts: NDArray[np.int64], scale: np.float32, kind: KVFormat
) -> float:
    """Return the sum of squared errors of magnitudes, each as often as counted, under a scale."""
    s, most = np.float64(scale), KV_LARGEST[kind]
    scaled = np.minimum(middles / s, most)
    if kind == "int8":
        rounded = np.rint(scaled)
    else:
        rounded = scaled.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return float(counts @ np.square(rounded * s - middles))


def _search(counts: NDArray[np.int64], largest: float, kind: KVFormat) -> np.float32:
    if largest < _VANISHING:
        return np.float32(1.0)
    seen = np.flatnonzero(counts)
    middles, counts = (seen + 0.5) * (largest / BINS), counts[seen]

    def best(ranges: NDArray[np.float64]) -> float:
        errors = [range_error(middles, counts, _scale(part), kind) for part in ranges]
        return float(ranges[int(np.argmin(errors))])

    def _scale(part: np.float64) -> np.float32:
        return np.float32(part * largest / KV_LARGEST[kind])

    coarse = best(_COARSE)
    around = np.minimum(coarse * _FINE, 1.0)
    return _scale(np.float64(best(np.array(sorted({coarse, *around.tolist()}, reverse=True)))))

"""The same range search in float64 numpy, written for reading; and what round to nearest means."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]


def groups_of(weight: NDArray[Any], group_size: int) -> list[tuple[tuple[int, ...], slice]]:
    """Return (index of the scale, slice along K) of every group of a matrix."""
    rows, channels = weight.shape
    return [
        ((row, start // group_size), slice(start, min(start + group_size, channels)))
        for row in range(rows)
        for start in range(0, channels, group_size)
    ]


def integer_range(bits: int, symmetric: bool) -> tuple[int, int]:
    if bits < 8 and not symmetric:
        return 0, (1 << bits) - 1
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1


def own_importance(group: Float64Array) -> Float64Array:
    """Return what stands in for the importances of a group's weights when there are none."""
    importance: Float64Array = group**2 + (group**2).mean()
    return importance


def fit_error(
    weights: Float64Array, scale: float, zero: float, limits: tuple[int, int], importance: Float64Array
) -> float:
    levels = np.clip(np.rint(weights / scale), limits[0] - zero, limits[1] - zero)
    return float((importance * (weights - levels * scale) ** 2).sum())


def full_range(weights: Float64Array, limits: tuple[int, int], symmetric: bool) -> tuple[float, float]:
    """Return scale and zero point of the full range of one group, the scale as float16."""
    if symmetric:
        return float(np.float16(np.abs(weights).max() / limits[1])), 0.0
    low, high = min(weights.min(), 0.0), max(weights.max(), 0.0)
    scale = float(np.float16((high - low) / (limits[1] - limits[0])))
    return scale, float(np.clip(limits[0] + np.rint(-low / scale), *limits))


def grid_error(weights: Float64Array, limits: tuple[int, int], symmetric: bool, importance: Float64Array) -> float:
    """Return the least error over a grid of ranges finer than the kernel's, without its refit."""
    best = np.inf
    steps = np.linspace(1.0, 0.7, 31)
    if symmetric:
        candidates = [(np.abs(weights).max() * step / limits[1], 0.0) for step in steps]
    else:
        low, high = min(weights.min(), 0.0), max(weights.max(), 0.0)
        candidates = []
        for a in steps[::2]:
            for b in steps[::2]:
                scale = (high * b - low * a) / (limits[1] - limits[0])
                candidates.append((scale, np.clip(limits[0] + np.rint(-low * a / scale), *limits)))
    for scale, zero in candidates:
        stored = float(np.float16(scale))
        best = min(best, fit_error(weights, stored, float(zero), limits, importance))
    return best

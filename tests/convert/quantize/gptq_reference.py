"""GPTQ as its paper writes it, in float64: the Cholesky factor of the inverse Gram matrix, damped, column by column.

Algorithm 1 of arXiv 2210.17323, with the order of channels and the ranges of groups given.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]


def gptq(
    weight: NDArray[Any],
    gram: NDArray[Any],
    order: NDArray[np.int64],
    scales: NDArray[Any],
    zero_points: NDArray[Any],
    group_size: int,
    limits: tuple[float, float],
    ridge: float,
) -> tuple[Float64Array, Float64Array]:
    """Return integers and dequantized weights, float64 `[N, K]`, in the channels' own order."""
    rows, channels = weight.shape
    permuted = gram.astype(np.float64)[np.ix_(order, order)] + ridge * np.eye(channels)
    upper = np.linalg.cholesky(np.linalg.inv(permuted)).T
    remaining = weight.astype(np.float64)[:, order]
    integers, dequantized = np.empty((rows, channels)), np.empty((rows, channels))
    for j, channel in enumerate(order):
        scale = scales[:, channel // group_size].astype(np.float64)
        zero = zero_points[:, channel // group_size].astype(np.float64)
        level = np.clip(np.rint(remaining[:, j] / scale), limits[0] - zero, limits[1] - zero)
        integers[:, channel] = level + zero
        dequantized[:, channel] = level * scale
        error = (remaining[:, j] - level * scale) / upper[j, j]
        remaining[:, j:] -= error[:, None] * upper[j, j:]
    return integers, dequantized


def output_error(weight: NDArray[Any], dequantized: NDArray[Any], gram: NDArray[Any]) -> float:
    """Return tr((W - Q) G (W - Q)^T) in float64."""
    difference = weight.astype(np.float64) - dequantized.astype(np.float64)
    return float(np.trace(difference @ gram.astype(np.float64) @ difference.T))

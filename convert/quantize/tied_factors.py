"""Factors of input channels: their form, and what they are chosen from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inferencex.convert.quantize.base import Calibration
from inferencex.convert.quantize.scheme import TensorScheme
from inferencex.formats.errors import QuantizationError

_LARGEST = 64.0


def tied(logarithms: NDArray[np.float64], ties: NDArray[np.int64] | None) -> NDArray[np.float32]:
    """Return factors, float32 `[K]`, from their logarithms: tied channels share the mean, and 1 is in the middle.

    Factors stay within 1/64 to 64, so that what absorbs them keeps the range of its type.
    """
    shared = logarithms
    if ties is not None:
        _, places = np.unique(ties, return_inverse=True)
        shared = (np.bincount(places, weights=logarithms) / np.bincount(places))[places]
    centred = shared - (shared.max() + shared.min()) / 2
    limit = np.log(_LARGEST)
    factors: NDArray[np.float32] = np.exp(np.clip(centred, -limit, limit)).astype(np.float32)
    return factors


def checked_statistics(
    name: str,
    weights: Sequence[NDArray[np.float32]],
    schemes: Sequence[TensorScheme],
    calibration: Calibration,
    ties: NDArray[np.int64] | None,
) -> int:
    """Return the number of input channels, once all parts agree on it. Raises QuantizationError."""
    channels: int = calibration.mean_square.shape[-1]
    if calibration.mean_square.ndim != 1 or (ties is not None and ties.shape != (channels,)):
        found = list(calibration.mean_square.shape), None if ties is None else list(ties.shape)
        raise QuantizationError(
            f"{name}: statistics and ties of shapes {found[0]} and {found[1]}, expected [K] of both"
        )
    if len(weights) != len(schemes):
        raise QuantizationError(f"{name}: {len(weights)} weights, but {len(schemes)} schemes")
    for weight in weights:
        if weight.ndim != 2 or weight.shape[1] != channels or not len(weight):
            raise QuantizationError(f"{name}: a weight {list(weight.shape)} does not read {channels} input channels")
    if not np.isfinite(calibration.mean_square).all() or (calibration.mean_square < 0).any():
        raise QuantizationError(f"{name}: the mean squares of its channels must be finite and not negative")
    return channels

"""How far a quantized weight moves the outputs it computes, from the second moments of its inputs."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from inferencex.convert.native import _error_feedback
from inferencex.convert.quantize.base import Calibration
from inferencex.formats.errors import QuantizationError


def output_error(errors: NDArray[np.float32], calibration: Calibration, *, threads: int | None = None) -> float:
    """Return the mean over tokens of the squared norm of `x E^T`, for `errors` E float32 `[N, K]`.

    That is tr(E G E^T) with the Gram matrix G of the inputs, or with its diagonal where there is no more of it. The
    result does not depend on `threads`, which defaults to the processors this process may use.
    """
    if calibration.gram is None:
        per_channel = np.square(errors.astype(np.float64)).sum(axis=0)
        return float((per_channel * calibration.mean_square).sum())
    workers = threads if threads is not None else len(os.sched_getaffinity(0))
    rows = np.empty(errors.shape[0])
    gram = np.ascontiguousarray(calibration.gram, dtype=np.float32)
    _error_feedback.quadratic(np.ascontiguousarray(errors), gram, rows, workers)
    # Rounding may leave a tiny negative number where there is no error.
    return max(float(rows.sum()), 0.0)


def checked_gram(name: str, gram: NDArray[np.float32] | None, channels: int) -> NDArray[np.float32]:
    """Return a Gram matrix as float32 `[K, K]` in C order; raises QuantizationError where it cannot be one."""
    if gram is None or gram.shape != (channels, channels):
        found = "none" if gram is None else str(list(gram.shape))
        raise QuantizationError(f"{name}: a Gram matrix of its {channels} input channels is needed, found {found}")
    if not np.isfinite(gram).all() or (gram.diagonal() < 0).any():
        raise QuantizationError(
            f"{name}: the Gram matrix of its inputs is not finite, or negative on its diagonal; the model's "
            "activations overflow on the calibration text"
        )
    return np.ascontiguousarray(gram, dtype=np.float32)

"""Calibration text without any text: what the model itself says, or tokens drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from inferencex.formats.errors import QuantizationError

Sampler = Callable[[NDArray[np.int64], int, int], NDArray[np.int64]]
"""Continues texts with the model: `(starts int64 [windows, P], length, seed) -> int64 [windows, length]`.

A result begins with its start, and the rest is drawn from the model's own distribution. The same arguments give the
same result.
"""


def sampled_windows(
    sampler: Sampler, prefix: Sequence[int], first_tokens: NDArray[np.int64], windows: int, length: int, seed: int
) -> NDArray[np.int64]:
    """Return `windows` texts of the model, int64 `[windows, length]`.

    Each begins with `prefix` and one of `first_tokens`, drawn anew for each, so that the texts differ from the first
    token on (LLM-QAT, https://arxiv.org/abs/2305.17888). Raises QuantizationError when `sampler` breaks its contract.
    """
    drawn = np.random.default_rng(seed).choice(first_tokens, size=(windows, 1))
    starts = np.concatenate([np.tile(np.asarray(prefix, dtype=np.int64), (windows, 1)), drawn], axis=1)
    result = np.asarray(sampler(starts, length, seed))
    if result.shape != (windows, length) or not np.issubdtype(result.dtype, np.integer):
        raise QuantizationError(
            f"--calibration self: the model's text is {result.dtype} {list(result.shape)}, expected token ids "
            f"[{windows}, {length}]"
        )
    if not np.array_equal(result[:, : starts.shape[1]], starts):
        raise QuantizationError("--calibration self: the model's text does not begin as it was told to")
    return result.astype(np.int64)


def random_windows(
    prefix: Sequence[int], tokens: NDArray[np.int64], windows: int, length: int, seed: int
) -> NDArray[np.int64]:
    """Return windows of tokens drawn from `tokens` with equal chances, after `prefix`: int64 `[windows, length]`."""
    drawn = np.random.default_rng(seed).choice(tokens, size=(windows, length - len(prefix)))
    return np.concatenate([np.tile(np.asarray(prefix, dtype=np.int64), (windows, 1)), drawn], axis=1)

"""Weights, and statistics of inputs like those of language models: correlated, with few large channels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferencex.convert.quantize.base import Calibration


def heavy_tailed(shape: tuple[int, ...], seed: int = 0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_t(5, shape) * 0.05).astype(np.float32)


def correlated_inputs(tokens: int, channels: int, seed: int = 1) -> NDArray[np.float32]:
    """Return `[tokens, channels]`: a few directions that all channels share, noise, and magnitudes that differ much."""
    random = np.random.default_rng(seed)
    shared = random.normal(size=(tokens, 6)) @ random.normal(size=(6, channels))
    magnitudes = np.exp(random.normal(size=channels))
    return ((shared + random.normal(size=(tokens, channels))) * magnitudes).astype(np.float32)


def statistics_of(inputs: NDArray[np.float32]) -> Calibration:
    """Return what a calibration says of inputs `[tokens, channels]`."""
    wide = inputs.astype(np.float64)
    gram = (wide.T @ wide / max(len(inputs), 1)).astype(np.float32)
    gram = np.triu(gram) + np.triu(gram, 1).T
    return Calibration(gram.diagonal().copy(), gram, np.abs(inputs).max(axis=0, initial=0.0), len(inputs))

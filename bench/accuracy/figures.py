"""Reading one row's logits as its process writes them, and comparing them with the source's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from inferencex.runtime.backends.divergence import Divergence, DivergenceSummary


def read_logits(stream: BinaryIO, windows: NDArray[np.int64]) -> Iterator[NDArray[np.float32]]:
    """Yield the logits of every window, float32 `[T, vocab]`, as `bench.accuracy.worker logits` writes them.

    Raises EOFError when they end early, which they do when the process fails.
    """
    length = windows.shape[1]
    vocab = int(json.loads(stream.readline() or b'{"vocab": 0}')["vocab"])
    for place in range(len(windows)):
        content = stream.read(4 * length * vocab)
        if not vocab or len(content) != 4 * length * vocab:
            raise EOFError(f"the logits ended in window {place} of {len(windows)}")
        yield np.frombuffer(content, np.float32).reshape(length, vocab)


def compare(
    source: Iterable[NDArray[np.float32]], model: Iterable[NDArray[np.float32]], windows: NDArray[np.int64]
) -> DivergenceSummary:
    """Return KL(source || model), agreement and perplexity over `windows`, int64 `[W, T]`.

    Raises ValueError when the two have vocabularies of different sizes, or figures are not finite.
    """
    divergence = Divergence()
    for wanted, found, window in zip(source, model, windows, strict=True):
        if wanted.shape != found.shape:
            raise ValueError(f"logits have the shape {found.shape}, those of the source {wanted.shape}")
        divergence.add(wanted, found, window)
    figures = divergence.summary()
    if not np.isfinite([figures.mean_kl, figures.perplexity]).all():
        raise ValueError("logits are not finite (NaN or infinity)")
    return figures

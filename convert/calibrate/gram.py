"""Second moments of the inputs of a linear: `X^T X / rows`, the Gram matrix that GPTQ calls the Hessian."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor

import torch
from torch import Tensor

_PANEL = 256  # columns that one task computes


def gram_matrix(batches: Sequence[Callable[[], Tensor]], channels: int, pool: Executor) -> Tensor:
    """Return float32 `[channels, channels]`: the mean over all rows of `x x^T`, exactly symmetric.

    `batches` give rows `[rows, channels]`. Products and sums are float32, batch after batch, each panel of columns by
    one task: the result does not depend on the number of threads. (A product that torch rounds to bfloat16 would do for
    speed, but not for definiteness: its Cholesky factorization fails.)
    """
    gram = torch.zeros(channels, channels)
    rows = sum(batch().shape[0] for batch in batches)
    if rows == 0:
        return gram

    def panel(start: int) -> None:
        stop = min(start + _PANEL, channels)
        total = gram[start:stop, start:]
        for batch in batches:
            x = batch()
            if len(x):
                total += x[:, start:stop].to(torch.float32).T @ x[:, start:].to(torch.float32)
        total /= rows

    for _ in pool.map(panel, range(0, channels, _PANEL)):
        pass
    return _mirror(gram)


def _mirror(gram: Tensor) -> Tensor:
    """Copy the upper triangle to the lower, panel by panel, in place."""
    for start in range(0, gram.shape[0], _PANEL):
        stop = start + _PANEL
        corner = gram[start:stop, start:stop]
        corner.copy_(torch.triu(corner) + torch.triu(corner, 1).T)
        gram[stop:, start:stop] = gram[start:stop, stop:].T
    return gram


def total_rows(batches: Iterable[Callable[[], Tensor]]) -> int:
    """Return the number of rows of all batches."""
    return sum(batch().shape[0] for batch in batches)

"""Second moments of the inputs of a linear: `X^T X / rows`, the Gram matrix that GPTQ calls the Hessian."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import torch
from torch import Tensor

from inferencex.convert.native import _gram

_PANEL = 256  # columns that one task computes


def gram_matrix(batches: Sequence[Callable[[], Tensor]], channels: int, pool: Executor, threads: int) -> Tensor:
    """Return float32 `[channels, channels]`: the mean over all rows of `x x^T`, exactly symmetric.

    `batches` give rows `[rows, channels]`, float32 or bfloat16. All sums are float32, batch after batch, in an order
    that does not depend on the number of threads. (A product that torch rounds to bfloat16 would be as fast as the
    native one, but what it makes is not positive definite.)
    """
    gram = torch.zeros(channels, channels)
    rows = 0
    for load in batches:
        x = load().contiguous()
        rows += len(x)
        if not len(x):
            continue
        if x.dtype == torch.bfloat16 and _gram.supported():
            _gram.accumulate(x.view(torch.uint16).numpy(), gram.numpy(), threads)
        else:
            _accumulate(x.to(torch.float32), gram, pool)
    _mirror(gram)  # what only the upper triangle has, the lower gets; the native sums are symmetric already
    return gram.div_(max(rows, 1))


def _accumulate(x: Tensor, gram: Tensor, pool: Executor) -> None:
    """Add `x^T x` to the upper triangle of `gram`, each panel of columns by one task."""

    def panel(start: int) -> None:
        stop = min(start + _PANEL, gram.shape[0])
        gram[start:stop, start:] += x[:, start:stop].T @ x[:, start:]

    for _ in pool.map(panel, range(0, gram.shape[0], _PANEL)):
        pass


def _mirror(gram: Tensor) -> None:
    """Copy the upper triangle to the lower, panel by panel, in place."""
    for start in range(0, gram.shape[0], _PANEL):
        stop = start + _PANEL
        corner = gram[start:stop, start:stop]
        corner.copy_(torch.triu(corner) + torch.triu(corner, 1).T)
        gram[stop:, start:stop] = gram[start:stop, stop:].T

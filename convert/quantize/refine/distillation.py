"""How far a model's predictions are from its source's, and in which direction its last hidden values should move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Logits = Callable[[Tensor], Tensor]
"""From what the head reads, `[rows, hidden]`, to logits `[rows, vocab]`; differentiable, each row by itself."""

# Logits that are held at once: a few tensors of this many float32 should stay in a processor's caches.
_CHUNK = 1 << 22
_FEWEST_ROWS = 32


@dataclass(frozen=True)
class Divergence:
    """KL(source || model) of some rows.

    total:     sum over the rows, nats
    gradient:  of `total` with respect to the hidden values `[rows, hidden]`; None when not asked for
    """

    total: float
    gradient: Tensor | None


def divergence(logits: Logits, hidden: Tensor, target: Tensor, *, gradient: bool) -> Divergence:
    """Compare the predictions from `hidden` with those from `target`, both `[rows, hidden]`, over the full vocabulary.

    Both go through the same head, a few rows at a time, so that memory does not grow with rows times vocabulary.
    """
    total, start, rows = 0.0, 0, _FEWEST_ROWS
    parts: list[Tensor] = []
    while start < len(hidden):
        part = hidden[start : start + rows].detach().requires_grad_(gradient)
        with torch.set_grad_enabled(gradient):
            predicted = logits(part)
        with torch.no_grad():
            wanted = torch.log_softmax(logits(target[start : start + rows].to(hidden.dtype)).to(torch.float32), -1)
            got = torch.log_softmax(predicted.detach().to(torch.float32), -1)
            probability = wanted.exp()
            total += float(torch.linalg.vecdot(probability, wanted.sub_(got)).sum())
            slope = got.exp_().sub_(probability)
        if gradient:
            parts += torch.autograd.grad(predicted, part, slope.to(predicted.dtype))
        start += len(part)
        rows = max(_FEWEST_ROWS, _CHUNK // predicted.shape[-1])
    return Divergence(total, torch.cat(parts) if gradient else None)

"""ONNX operators that pick elements of a tensor, or put them somewhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from inferencex.runtime.backends.reference.registry import Registry, integers

OPERATORS = Registry()


@OPERATORS.operator("Slice")
def _slice(x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Tensor | None = None) -> Tensor:
    first, last = integers(starts) or [], integers(ends) or []
    dims = integers(axes) or list(range(len(first)))
    strides = integers(steps) or [1] * len(first)
    for start, end, dim, step in zip(first, last, dims, strides, strict=True):
        size = x.shape[dim]
        index = (
            torch.arange(size)[slice(start, max(end, -size - 1) if end > -size - 1 else None, 1)] if step > 0 else None
        )
        if index is None:
            low = max(end + size if end < 0 else end, -1) if end > -size - 1 else -1
            high = min(start + size if start < 0 else start, size - 1)
            index = torch.arange(high, low, step)
        else:
            index = index[::step]
        x = x.index_select(dim, index)
    return x


@OPERATORS.operator("Gather")
def _gather(x: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
    axis = axis % x.dim()
    index = torch.where(indices < 0, indices + x.shape[axis], indices).to(torch.int64)
    picked = x.index_select(axis, index.reshape(-1))
    return picked.reshape((*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]))


@OPERATORS.operator("GatherElements")
def _gather_elements(x: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
    return torch.gather(x, axis, torch.where(indices < 0, indices + x.shape[axis], indices))


@OPERATORS.operator("ScatterElements")
def _scatter_elements(x: Tensor, indices: Tensor, updates: Tensor, axis: int = 0, reduction: str = "none") -> Tensor:
    index = torch.where(indices < 0, indices + x.shape[axis], indices)
    if reduction == "none":
        return x.scatter(axis, index, updates)
    return x.scatter_reduce(
        axis, index, updates, {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}[reduction]
    )


@OPERATORS.operator("Trilu")
def _trilu(x: Tensor, k: Tensor | None = None, upper: int = 1) -> Tensor:
    diagonal = 0 if k is None else int(k)
    return torch.triu(x, diagonal) if upper else torch.tril(x, diagonal)


@OPERATORS.operator("OneHot")
def _one_hot(indices: Tensor, depth: Tensor, values: Tensor, axis: int = -1) -> Tensor:
    hot = F.one_hot(indices.to(torch.int64) % int(depth), int(depth)).bool()
    y = torch.where(hot, values[1], values[0])
    return y if axis in (-1, y.dim() - 1) else y.movedim(-1, axis)

"""ONNX operators that combine the elements along an axis."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inferencex.runtime.backends.reference.registry import Operator, Registry, integers

OPERATORS = Registry()


def _reduce(function: Callable[..., Tensor]) -> Operator:
    def run(x: Tensor, axes: Tensor | None = None, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
        dims = integers(axes)
        if not dims:
            if noop_with_empty_axes:
                return x
            dims = list(range(x.dim()))
        return function(x, dims, bool(keepdims))

    return run


OPERATORS[("", "ReduceMean")] = _reduce(lambda x, dims, keep: torch.mean(x, dims, keep))
OPERATORS[("", "ReduceSum")] = _reduce(lambda x, dims, keep: torch.sum(x, dims, keep))
OPERATORS[("", "ReduceMax")] = _reduce(lambda x, dims, keep: torch.amax(x, dims, keep))
OPERATORS[("", "ReduceMin")] = _reduce(lambda x, dims, keep: torch.amin(x, dims, keep))
OPERATORS[("", "ReduceL2")] = _reduce(lambda x, dims, keep: torch.linalg.vector_norm(x, 2, dims, keep))
OPERATORS[("", "ReduceL1")] = _reduce(lambda x, dims, keep: torch.linalg.vector_norm(x, 1, dims, keep))
OPERATORS[("", "ReduceSumSquare")] = _reduce(lambda x, dims, keep: torch.sum(x * x, dims, keep))


@OPERATORS.operator("Softmax")
def _softmax(x: Tensor, axis: int = -1) -> Tensor:
    return torch.softmax(x, dim=axis)


@OPERATORS.operator("LogSoftmax")
def _log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    return torch.log_softmax(x, dim=axis)


@OPERATORS.operator("ArgMax")
def _argmax(x: Tensor, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    return torch.argmax(x, dim=axis, keepdim=bool(keepdims))


@OPERATORS.operator("TopK")
def _topk(x: Tensor, k: Tensor, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[Tensor, Tensor]:
    values, indices = torch.topk(x, int(k), dim=axis, largest=bool(largest), sorted=True)
    return values, indices


@OPERATORS.operator("CumSum")
def _cumsum(x: Tensor, axis: Tensor, exclusive: int = 0, reverse: int = 0) -> Tensor:
    dim = int(axis)
    x = x.flip(dim) if reverse else x
    total = torch.cumsum(x, dim, dtype=x.dtype)
    total = total - x if exclusive else total
    return total.flip(dim) if reverse else total


@OPERATORS.operator("RMSNormalization")
def _rms_norm(x: Tensor, scale: Tensor, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> Tensor:
    dims = list(range(axis % x.dim(), x.dim()))
    return x * torch.rsqrt(torch.mean(x * x, dims, True) + epsilon) * scale


@OPERATORS.operator("LayerNormalization")
def _layer_norm(
    x: Tensor, scale: Tensor, bias: Tensor | None = None, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    dims = list(range(axis % x.dim(), x.dim()))
    centered = x - x.mean(dims, True)
    y = centered * torch.rsqrt(torch.mean(centered * centered, dims, True) + epsilon) * scale
    return y if bias is None else y + bias

"""ONNX operators that rearrange a tensor, or make one from a shape."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from inferencex.runtime.backends.reference.registry import Registry, integers

OPERATORS = Registry()


@OPERATORS.operator("Shape")
def _shape(x: Tensor, start: int = 0, end: int | None = None) -> Tensor:
    return torch.tensor(x.shape[start:end], dtype=torch.int64)


@OPERATORS.operator("Size")
def _size(x: Tensor) -> Tensor:
    return torch.tensor(x.numel(), dtype=torch.int64)


@OPERATORS.operator("Reshape")
def _reshape(x: Tensor, shape: Tensor, allowzero: int = 0) -> Tensor:
    dims = integers(shape) or []
    if not allowzero:
        dims = [x.shape[i] if d == 0 else d for i, d in enumerate(dims)]
    return x.reshape(dims)


@OPERATORS.operator("Flatten")
def _flatten(x: Tensor, axis: int = 1) -> Tensor:
    return x.reshape(math.prod(x.shape[:axis]), -1)


@OPERATORS.operator("Transpose")
def _transpose(x: Tensor, perm: Sequence[int] | None = None) -> Tensor:
    return x.permute(*(perm if perm is not None else reversed(range(x.dim()))))


@OPERATORS.operator("Unsqueeze")
def _unsqueeze(x: Tensor, axes: Tensor) -> Tensor:
    dims = integers(axes) or []
    for dim in sorted(d % (x.dim() + len(dims)) for d in dims):
        x = x.unsqueeze(dim)
    return x


@OPERATORS.operator("Squeeze")
def _squeeze(x: Tensor, axes: Tensor | None = None) -> Tensor:
    dims = integers(axes)
    return x.squeeze() if dims is None else x.squeeze(tuple(dims))


@OPERATORS.operator("Expand")
def _expand(x: Tensor, shape: Tensor) -> Tensor:
    wanted = integers(shape) or []
    wanted = [1] * (x.dim() - len(wanted)) + wanted
    found = [1] * (len(wanted) - x.dim()) + list(x.shape)
    return x.expand([have if want == 1 else want for want, have in zip(wanted, found, strict=True)])


@OPERATORS.operator("Tile")
def _tile(x: Tensor, repeats: Tensor) -> Tensor:
    return x.repeat(*(integers(repeats) or []))


@OPERATORS.operator("Concat")
def _concat(*inputs: Tensor, axis: int) -> Tensor:
    return torch.cat(inputs, dim=axis)


@OPERATORS.operator("Split")
def _split(x: Tensor, split: Tensor | None = None, axis: int = 0, num_outputs: int = 0) -> tuple[Tensor, ...]:
    sizes = integers(split)
    if sizes is None:
        each = -(-x.shape[axis] // num_outputs)
        sizes = [each] * (num_outputs - 1) + [x.shape[axis] - each * (num_outputs - 1)]
    return torch.split(x, sizes, dim=axis)


@OPERATORS.operator("ConstantOfShape")
def _constant_of_shape(shape: Tensor, value: Tensor | None = None) -> Tensor:
    if value is None:
        return torch.zeros(integers(shape) or [])
    return torch.full(integers(shape) or [], value.reshape(()).item(), dtype=value.dtype)


@OPERATORS.operator("Range")
def _range(start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    return torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)

"""ONNX operators in torch, one plain function each; activations are float32.

A function takes the node's inputs (absent optional ones are None) and its attributes as keyword arguments, and
returns one tensor or a tuple. Operators that are not here run through `onnx.reference` (see `fallback.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Operator = Callable[..., Any]
OPERATORS: dict[tuple[str, str], Operator] = {}

# ONNX TensorProto.DataType -> torch, for Cast
DTYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64, 9: torch.bool,
    10: torch.float16, 11: torch.float64, 16: torch.bfloat16,
}  # fmt: skip


def operator(name: str, domain: str = "") -> Callable[[Operator], Operator]:
    """Register a function as the implementation of an operator."""

    def register(function: Operator) -> Operator:
        OPERATORS[(domain, name)] = function
        return function

    return register


def _ints(x: Tensor | None) -> list[int] | None:
    return None if x is None else [int(i) for i in x.reshape(-1).tolist()]


def _unary(name: str, function: Callable[[Tensor], Tensor]) -> None:
    OPERATORS[("", name)] = lambda x: function(x)


for _name, _function in {
    "Abs": torch.abs, "Ceil": torch.ceil, "Cos": torch.cos, "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor,
    "Identity": lambda x: x, "IsNaN": torch.isnan, "Log": torch.log, "Neg": torch.neg, "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal, "Relu": torch.relu, "Round": torch.round, "Sigmoid": torch.sigmoid,
    "Sign": torch.sign, "Sin": torch.sin, "Softplus": F.softplus, "Sqrt": torch.sqrt, "Tanh": torch.tanh,
    "HardSwish": F.hardswish,
}.items():  # fmt: skip
    _unary(_name, _function)


def _binary(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    OPERATORS[("", name)] = lambda a, b: function(a, b)


def _div(a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


for _name, _pair in {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": _div, "Pow": lambda a, b: torch.pow(a, b.to(a.dtype)),
    "Equal": torch.eq, "Greater": torch.gt, "GreaterOrEqual": torch.ge, "Less": torch.lt, "LessOrEqual": torch.le,
    "And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor, "PRelu": lambda a, b: torch.where(a < 0, a * b, a),
}.items():  # fmt: skip
    _binary(_name, _pair)


@operator("Max")
def _max(first: Tensor, *rest: Tensor) -> Tensor:
    for other in rest:
        first = torch.maximum(first, other)
    return first


@operator("Min")
def _min(first: Tensor, *rest: Tensor) -> Tensor:
    for other in rest:
        first = torch.minimum(first, other)
    return first


@operator("Sum")
def _sum(first: Tensor, *rest: Tensor) -> Tensor:
    for other in rest:
        first = first + other
    return first


@operator("Mod")
def _mod(a: Tensor, b: Tensor, fmod: int = 0) -> Tensor:
    return torch.fmod(a, b) if fmod else torch.remainder(a, b)


@operator("Clip")
def _clip(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    x = x if low is None else torch.maximum(x, low)
    return x if high is None else torch.minimum(x, high)


@operator("Where")
def _where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(condition, a, b)


@operator("Cast")
def _cast(x: Tensor, to: int, saturate: int = 1, round_mode: str = "up") -> Tensor:
    return x.to(DTYPES[to])


@operator("CastLike")
def _cast_like(x: Tensor, target: Tensor, saturate: int = 1, round_mode: str = "up") -> Tensor:
    return x.to(target.dtype)


@operator("Gelu")
def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    return F.gelu(x, approximate=approximate)


@operator("LeakyRelu")
def _leaky_relu(x: Tensor, alpha: float = 0.01) -> Tensor:
    return F.leaky_relu(x, alpha)


@operator("Elu")
def _elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return F.elu(x, alpha)


@operator("Softmax")
def _softmax(x: Tensor, axis: int = -1) -> Tensor:
    return torch.softmax(x, dim=axis)


@operator("LogSoftmax")
def _log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    return torch.log_softmax(x, dim=axis)


@operator("MatMul")
def _matmul(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


@operator("Gemm")
def _gemm(
    a: Tensor, b: Tensor, c: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0, transA: int = 0, transB: int = 0
) -> Tensor:
    y = (a.T if transA else a) @ (b.T if transB else b)
    y = y if alpha == 1.0 else alpha * y
    return y if c is None else y + (c if beta == 1.0 else beta * c)


@operator("Einsum")
def _einsum(*inputs: Tensor, equation: str) -> Tensor:
    return torch.einsum(equation, *inputs)


def _reduce(function: Callable[..., Tensor]) -> Operator:
    def run(x: Tensor, axes: Tensor | None = None, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
        dims = _ints(axes)
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


@operator("ArgMax")
def _argmax(x: Tensor, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    return torch.argmax(x, dim=axis, keepdim=bool(keepdims))


@operator("TopK")
def _topk(x: Tensor, k: Tensor, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[Tensor, Tensor]:
    values, indices = torch.topk(x, int(k), dim=axis, largest=bool(largest), sorted=True)
    return values, indices


@operator("CumSum")
def _cumsum(x: Tensor, axis: Tensor, exclusive: int = 0, reverse: int = 0) -> Tensor:
    dim = int(axis)
    x = x.flip(dim) if reverse else x
    total = torch.cumsum(x, dim, dtype=x.dtype)
    total = total - x if exclusive else total
    return total.flip(dim) if reverse else total


@operator("RMSNormalization")
def _rms_norm(x: Tensor, scale: Tensor, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> Tensor:
    dims = list(range(axis % x.dim(), x.dim()))
    return x * torch.rsqrt(torch.mean(x * x, dims, True) + epsilon) * scale


@operator("LayerNormalization")
def _layer_norm(
    x: Tensor, scale: Tensor, bias: Tensor | None = None, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    dims = list(range(axis % x.dim(), x.dim()))
    centered = x - x.mean(dims, True)
    y = centered * torch.rsqrt(torch.mean(centered * centered, dims, True) + epsilon) * scale
    return y if bias is None else y + bias


@operator("RotaryEmbedding")
def _rotary(
    x: Tensor,
    cos_cache: Tensor,
    sin_cache: Tensor,
    position_ids: Tensor | None = None,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
) -> Tensor:
    heads = x if x.dim() == 4 else x.unflatten(-1, (num_heads, -1)).transpose(1, 2)  # [B, H, T, D]
    width = rotary_embedding_dim or heads.shape[-1]
    cos = cos_cache if position_ids is None else cos_cache[position_ids]
    sin = sin_cache if position_ids is None else sin_cache[position_ids]
    cos, sin = cos[:, None, :, : width // 2], sin[:, None, :, : width // 2]
    rotated, rest = heads[..., :width], heads[..., width:]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    else:
        a, b = rotated.chunk(2, dim=-1)
        rotated = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
    y = torch.cat((rotated, rest), dim=-1)
    return y if x.dim() == 4 else y.transpose(1, 2).flatten(2)


@operator("DequantizeLinear")
def _dequantize(
    x: Tensor, scale: Tensor, zero_point: Tensor | None = None, axis: int = 1, block_size: int = 0, output_dtype: int = 0
) -> Tensor:
    axis = axis % x.dim()
    scale = scale.to(torch.float32)
    zero = torch.zeros_like(scale) if zero_point is None else zero_point.to(torch.float32)
    if block_size:
        scale = scale.repeat_interleave(block_size, axis).narrow(axis, 0, x.shape[axis])
        zero = zero.repeat_interleave(block_size, axis).narrow(axis, 0, x.shape[axis])
    elif scale.dim() == 1:
        shape = [-1 if i == axis else 1 for i in range(x.dim())]
        scale, zero = scale.reshape(shape), zero.reshape(shape)
    return (x.to(torch.float32) - zero) * scale


# --- shapes -------------------------------------------------------------------------------------------------


@operator("Shape")
def _shape(x: Tensor, start: int = 0, end: int | None = None) -> Tensor:
    return torch.tensor(x.shape[start:end], dtype=torch.int64)


@operator("Size")
def _size(x: Tensor) -> Tensor:
    return torch.tensor(x.numel(), dtype=torch.int64)


@operator("Reshape")
def _reshape(x: Tensor, shape: Tensor, allowzero: int = 0) -> Tensor:
    dims = _ints(shape) or []
    if not allowzero:
        dims = [x.shape[i] if d == 0 else d for i, d in enumerate(dims)]
    return x.reshape(dims)


@operator("Flatten")
def _flatten(x: Tensor, axis: int = 1) -> Tensor:
    return x.reshape(int(torch.tensor(x.shape[:axis]).prod()) if axis else 1, -1)


@operator("Transpose")
def _transpose(x: Tensor, perm: Sequence[int] | None = None) -> Tensor:
    return x.permute(*(perm if perm is not None else reversed(range(x.dim()))))


@operator("Unsqueeze")
def _unsqueeze(x: Tensor, axes: Tensor) -> Tensor:
    dims = _ints(axes) or []
    for dim in sorted(d % (x.dim() + len(dims)) for d in dims):
        x = x.unsqueeze(dim)
    return x


@operator("Squeeze")
def _squeeze(x: Tensor, axes: Tensor | None = None) -> Tensor:
    dims = _ints(axes)
    return x.squeeze() if dims is None else x.squeeze(tuple(dims))


@operator("Expand")
def _expand(x: Tensor, shape: Tensor) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, tuple(_ints(shape) or [])))


@operator("Tile")
def _tile(x: Tensor, repeats: Tensor) -> Tensor:
    return x.repeat(*(_ints(repeats) or []))


@operator("Concat")
def _concat(*inputs: Tensor, axis: int) -> Tensor:
    return torch.cat(inputs, dim=axis)


@operator("Split")
def _split(x: Tensor, split: Tensor | None = None, axis: int = 0, num_outputs: int = 0) -> tuple[Tensor, ...]:
    sizes = _ints(split)
    if sizes is None:
        each = -(-x.shape[axis] // num_outputs)
        sizes = [each] * (num_outputs - 1) + [x.shape[axis] - each * (num_outputs - 1)]
    return torch.split(x, sizes, dim=axis)


@operator("Slice")
def _slice(x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Tensor | None = None) -> Tensor:
    first, last = _ints(starts) or [], _ints(ends) or []
    dims = _ints(axes) or list(range(len(first)))
    strides = _ints(steps) or [1] * len(first)
    for start, end, dim, step in zip(first, last, dims, strides, strict=True):
        size = x.shape[dim]
        index = torch.arange(size)[slice(start, max(end, -size - 1) if end > -size - 1 else None, 1)] if step > 0 else None
        if index is None:
            low = max(end + size if end < 0 else end, -1) if end > -size - 1 else -1
            high = min(start + size if start < 0 else start, size - 1)
            index = torch.arange(high, low, step)
        else:
            index = index[::step]
        x = x.index_select(dim, index)
    return x


@operator("Gather")
def _gather(x: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
    axis = axis % x.dim()
    index = torch.where(indices < 0, indices + x.shape[axis], indices).to(torch.int64)
    picked = x.index_select(axis, index.reshape(-1))
    return picked.reshape((*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]))


@operator("GatherElements")
def _gather_elements(x: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
    return torch.gather(x, axis, torch.where(indices < 0, indices + x.shape[axis], indices))


@operator("ScatterElements")
def _scatter_elements(x: Tensor, indices: Tensor, updates: Tensor, axis: int = 0, reduction: str = "none") -> Tensor:
    index = torch.where(indices < 0, indices + x.shape[axis], indices)
    if reduction == "none":
        return x.scatter(axis, index, updates)
    return x.scatter_reduce(axis, index, updates, {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}[reduction])


@operator("ConstantOfShape")
def _constant_of_shape(shape: Tensor, value: Tensor | None = None) -> Tensor:
    fill = torch.zeros(1) if value is None else value
    return torch.full(_ints(shape) or [], fill.reshape(()).item(), dtype=fill.dtype)


@operator("Range")
def _range(start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    return torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)


@operator("Trilu")
def _trilu(x: Tensor, k: Tensor | None = None, upper: int = 1) -> Tensor:
    diagonal = 0 if k is None else int(k)
    return torch.triu(x, diagonal) if upper else torch.tril(x, diagonal)


@operator("OneHot")
def _one_hot(indices: Tensor, depth: Tensor, values: Tensor, axis: int = -1) -> Tensor:
    hot = F.one_hot(indices.to(torch.int64) % int(depth), int(depth)).bool()
    y = torch.where(hot, values[1], values[0])
    return y if axis in (-1, y.dim() - 1) else y.movedim(-1, axis)

"""ONNX operators on matrices, rotary embedding, and the dequantization of weights."""

from __future__ import annotations

import torch
from torch import Tensor

from inferencex.runtime.backends.reference.registry import Registry

OPERATORS = Registry()


@OPERATORS.operator("MatMul")
def _matmul(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


@OPERATORS.operator("Gemm")
def _gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    y = (a.T if transA else a) @ (b.T if transB else b)
    y = y if alpha == 1.0 else alpha * y
    return y if c is None else y + (c if beta == 1.0 else beta * c)


@OPERATORS.operator("Einsum")
def _einsum(*inputs: Tensor, equation: str) -> Tensor:
    return torch.einsum(equation, *inputs)


@OPERATORS.operator("RotaryEmbedding")
def _rotary(
    x: Tensor,
    cos_cache: Tensor,
    sin_cache: Tensor,
    position_ids: Tensor | None = None,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
) -> Tensor:
    heads = x if x.dim() == 4 else torch.unflatten(x, -1, (num_heads, -1)).transpose(1, 2)  # [B, H, T, D]
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


@OPERATORS.operator("DequantizeLinear")
def _dequantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Tensor:
    axis = axis % x.dim()
    y = x.to(torch.float32)  # the only copy: weights may be large
    scale = scale.to(torch.float32)
    zero = None if zero_point is None else zero_point.to(torch.float32)
    if not block_size:
        shape = [-1 if i == axis else 1 for i in range(x.dim())] if scale.dim() == 1 else list(scale.shape)
        y = y if zero is None else y.sub_(zero.reshape(shape))
        return y.mul_(scale.reshape(shape))
    for block in range(scale.shape[axis]):
        start = block * block_size
        part = y.narrow(axis, start, min(block_size, x.shape[axis] - start))
        if zero is not None:
            part.sub_(zero.narrow(axis, block, 1))
        part.mul_(scale.narrow(axis, block, 1))
    return y

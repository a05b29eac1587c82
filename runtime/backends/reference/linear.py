"""ONNX operators on matrices, rotary embedding, quantization of activations, and dequantization."""

from __future__ import annotations

import torch
from torch import Tensor

from inferencex.formats.dialect.names import DOMAIN
from inferencex.formats.dialect.reference import quantize_rows
from inferencex.formats.dtypes import DataType
from inferencex.formats.errors import BackendError
from inferencex.formats.packing import unpack_bits
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


@OPERATORS.operator("QuantizeRows", DOMAIN)
def _quantize_rows(x: Tensor, to: int) -> tuple[Tensor, Tensor]:
    values, scales = quantize_rows(x.numpy(), DataType(to))
    if to == DataType.INT8:
        return torch.from_numpy(values), torch.from_numpy(scales)
    return torch.from_numpy(values.view("uint8")).view(torch.float8_e4m3fn), torch.from_numpy(scales)


@OPERATORS.operator("QuantizeLinear")
def _quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
    saturate: int = 1,
) -> Tensor:
    """With one scale for everything or one along `axis`; the type of the result is that of the zero point."""
    to = torch.uint8 if zero_point is None else zero_point.dtype
    to = _TORCH_TYPES.get(output_dtype, to)
    if block_size or to not in _LIMITS:
        raise BackendError(f"QuantizeLinear to {to} in blocks of {block_size} is not supported; expected whole axes")
    low, high = _LIMITS[to]
    shape = [-1 if i == axis % x.dim() else 1 for i in range(x.dim())] if scale.numel() > 1 else []
    y = x / scale.to(torch.float32).reshape(shape)
    if to == torch.float8_e4m3fn:
        return y.clamp(low, high).to(to)
    zero = 0 if zero_point is None else zero_point.to(torch.float32).reshape(shape)
    return (torch.round(y) + zero).clamp(low, high).to(to)


_LIMITS = {torch.int8: (-128, 127), torch.uint8: (0, 255), torch.float8_e4m3fn: (-448, 448)}
_TORCH_TYPES = {
    int(DataType.INT8): torch.int8,
    int(DataType.UINT8): torch.uint8,
    int(DataType.FLOAT8E4M3FN): torch.float8_e4m3fn,
}


@OPERATORS.operator("UnpackBits", DOMAIN)
def _unpack_bits(packed: Tensor, bits: int, shape: list[int], signed: int = 0) -> Tensor:
    return torch.from_numpy(unpack_bits(packed.numpy(), bits, tuple(shape), signed=bool(signed)))

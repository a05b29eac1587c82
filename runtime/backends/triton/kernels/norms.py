"""RMS and layer normalization of rows, with the residual addition before and the quantization behind in one pass.

A program is a row. One of up to 16384 elements is in registers: what is read and written is each operand once, which is
all that these kernels cost: `[T, S]` of 16-bit elements normalized after an addition move `8 * T * S` bytes. A wider
one is read again for every pass, from cache where it fits, and quantized by a kernel of its own.

Arithmetic is float32; sums and normalized rows are rounded to the type of `x`, and the later steps read the rounded
numbers, so that fused and separate kernels give the same bits.
"""

# Triton reads the types of a kernel's arguments when it is launched: annotations say only what is a constant.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferencex.runtime.backends.triton.kernels.quantize_rows import (
    Quantization,
    Quantized,
    as_bytes,
    quantize_by,
    quantize_row,
    row_launch,
)
from inferencex.runtime.backends.triton.kernels.variant import KernelVariant

_WIDEST_HELD = 16384  # wider rows take more registers than there are, with what is added and multiplied
_PIECE = 4096
_PIECE_WARPS = 8


@triton.jit
def _norm(
    x,
    residual,
    scale,
    bias,
    y,
    total,
    values,
    row_scales,
    x_stride,
    width,
    epsilon,
    CENTERED: tl.constexpr,
    ADDS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    QUANTIZES: tl.constexpr,
    TO_FP8: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalize the row of this program: Zhang and Sennrich 2019; CENTERED, Ba et al. 2016.

    y:         where rows go; None where nobody reads them unquantized
    ADDS:      `residual [T, S]` is added first, and the sum written to `total`
    QUANTIZES: "" for not at all; "rows", `values` and `row_scales` are written; "fixed", `values` are, by the one scale
               that `row_scales` holds
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = row * width + column
    numbers = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        numbers += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        rounded = numbers.to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=inside)
        numbers = rounded.to(tl.float32)
    if CENTERED:
        numbers = tl.where(inside, numbers - tl.sum(numbers, axis=0) / width, 0.0)
    factor = tl.math.rsqrt(tl.sum(numbers * numbers, axis=0) / width + epsilon)
    normed = numbers * factor * tl.load(scale + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        normed += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    result = normed.to(x.dtype.element_ty)
    if y is not None:
        tl.store(y + place, result, mask=inside)
    if QUANTIZES == "rows":
        quantized, row_scale = quantize_row(result.to(tl.float32), TO_FP8)
        tl.store(values + place, quantized, mask=inside)
        tl.store(row_scales + row, row_scale)
    elif QUANTIZES == "fixed":
        tl.store(values + place, quantize_by(result.to(tl.float32), tl.load(row_scales), 0, TO_FP8), mask=inside)


@triton.jit
def _piece(x, residual, x_start, start, offset, width, ADDS: tl.constexpr, PIECE: tl.constexpr):
    """Return columns, which of them are inside, and float32 numbers of the piece at `offset`, rounded if a sum."""
    column = offset + tl.arange(0, PIECE)
    inside = column < width
    numbers = tl.load(x + x_start + column, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        numbers += tl.load(residual + start + column, mask=inside, other=0.0).to(tl.float32)
        numbers = numbers.to(residual.dtype.element_ty).to(tl.float32)
    return column, inside, numbers


@triton.jit
def _norm_in_pieces(
    x,
    residual,
    scale,
    bias,
    y,
    total,
    x_stride,
    width,
    epsilon,
    CENTERED: tl.constexpr,
    ADDS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Normalize the row of this program, of any width, as `_norm` does; two passes over it, three where CENTERED."""
    row = tl.program_id(0).to(tl.int64)
    x_start, start = row * x_stride, row * width
    mean = 0.0
    if CENTERED:
        sums = tl.zeros((PIECE,), tl.float32)
        for offset in range(0, width, PIECE):
            column, inside, numbers = _piece(x, residual, x_start, start, offset, width, ADDS, PIECE)
            sums += numbers
        mean = tl.sum(sums, axis=0) / width
    squares = tl.zeros((PIECE,), tl.float32)
    for offset in range(0, width, PIECE):
        column, inside, numbers = _piece(x, residual, x_start, start, offset, width, ADDS, PIECE)
        if ADDS:
            tl.store(total + start + column, numbers.to(total.dtype.element_ty), mask=inside)
        numbers = tl.where(inside, numbers - mean, 0.0)
        squares += numbers * numbers
    factor = tl.math.rsqrt(tl.sum(squares, axis=0) / width + epsilon)
    for offset in range(0, width, PIECE):
        column, inside, numbers = _piece(x, residual, x_start, start, offset, width, ADDS, PIECE)
        normed = (numbers - mean) * factor * tl.load(scale + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            normed += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + start + column, normed.to(x.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Normalized:
    """What a normalization gives.

    y:         normalized rows `[T, S]`, of the type of `x`; None where only quantized ones are wanted
    quantized: the same in 8 bits, where they are wanted
    total:     `x + residual`, where there is a residual
    """

    y: Tensor | None
    quantized: Quantized | None
    total: Tensor | None


def rms_norm(x: Tensor, scale: Tensor, epsilon: float, *, out: Tensor | None = None) -> Tensor:
    """Return `x / sqrt(mean(x^2) + epsilon) * scale` of rows `[T, S]`, whose rows may lie apart."""
    return _required(normalize(x, scale, epsilon, out=out).y)


def layer_norm(x: Tensor, scale: Tensor, bias: Tensor | None, epsilon: float, *, out: Tensor | None = None) -> Tensor:
    """Return `(x - mean(x)) / sqrt(var(x) + epsilon) * scale + bias` of rows `[T, S]`."""
    return _required(normalize(x, scale, epsilon, bias=bias, centered=True, out=out).y)


def add_rms_norm(x: Tensor, residual: Tensor, scale: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the normalized sum and the sum, `[T, S]` both: the dialect's `AddRMSNormalization`."""
    result = normalize(x, scale, epsilon, residual=residual)
    return _required(result.y), _required(result.total)


def add_layer_norm(
    x: Tensor, residual: Tensor, scale: Tensor, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return the normalized sum and the sum, `[T, S]` both: the dialect's `AddLayerNormalization`."""
    result = normalize(x, scale, epsilon, residual=residual, bias=bias, centered=True)
    return _required(result.y), _required(result.total)


def normalize(
    x: Tensor,
    scale: Tensor,
    epsilon: float,
    *,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    centered: bool = False,
    quantization: Quantization | None = None,
    keep: bool = False,
    out: Tensor | None = None,
) -> Normalized:
    """Normalize rows `[T, S]`; every fused form is one launch, for rows of up to 16384 elements.

    residual: `[T, S]`, added first
    bias:     `[S]`, added last
    centered: layer normalization in place of RMS
    quantization: quantizes the normalized rows
    keep:     also gives them unquantized
    out:      where the unquantized rows go
    """
    rows, width = _checked(x, scale, bias, residual, out)
    if quantization is not None and out is not None and not keep:
        raise ValueError("quantized rows are not written to `out`")
    is_wide = width > _WIDEST_HELD
    total = None if residual is None else torch.empty_like(residual)
    y, quantized = out, None
    if quantization is not None and not is_wide:
        quantized = quantization.places((rows, width), x.device)
    if y is None and (quantized is None or keep):
        y = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    terms = {"CENTERED": centered, "ADDS": residual is not None, "HAS_BIAS": bias is not None}
    if rows and is_wide:
        _norm_in_pieces[(rows,)](
            x,
            residual,
            scale,
            bias,
            y,
            total,
            x.stride(0),
            width,
            epsilon,
            **terms,
            PIECE=_PIECE,
            num_warps=_PIECE_WARPS,
        )
    elif rows:
        block, warps = row_launch(width)
        _norm[(rows,)](
            x,
            residual,
            scale,
            bias,
            y,
            total,
            None if quantized is None else as_bytes(quantized.values),
            None if quantized is None else quantized.scales,
            x.stride(0),
            width,
            epsilon,
            **terms,
            QUANTIZES="" if quantization is None else quantization.kind,
            TO_FP8=quantization is not None and quantization.to == torch.float8_e4m3fn,
            BLOCK=block,
            num_warps=warps,
        )
    if quantization is not None and quantized is None:
        return Normalized(y if keep else None, quantization.of(_required(y)), total)
    return Normalized(y, quantized, total)


def _required(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _checked(
    x: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor | None
) -> tuple[int, int]:
    if x.dim() != 2 or (x.shape[1] > 1 and x.stride(1) != 1):
        raise ValueError(f"rows {list(x.shape)} with strides {x.stride()}; expected [rows, width], each row contiguous")
    rows, width = x.shape
    for name, vector in (("scale", scale), ("bias", bias)):
        if vector is not None and (list(vector.shape) != [width] or not vector.is_contiguous()):
            raise ValueError(f"{name} is {list(vector.shape)}; expected contiguous [{width}]")
    for name, matrix in (("residual", residual), ("out", out)):
        if matrix is not None and (matrix.shape != x.shape or not matrix.is_contiguous() or matrix.dtype != x.dtype):
            raise ValueError(
                f"{name} is {matrix.dtype} {list(matrix.shape)}; expected contiguous {x.dtype} {list(x.shape)}"
            )
    return rows, width


def variants() -> list[KernelVariant]:
    """Return what launches compile."""
    cases = [("fp16", 128), ("bf16", 128), ("fp16", 4096), ("bf16", 4096), ("bf16", 16384), ("fp32", 16384)]
    found = [
        _variant(dtype, width, centered, adds, to)
        for dtype, width in cases
        for centered in (False, True)
        for adds in (False, True)
        for to in (None, "int8", "fp8")
        if dtype == "bf16" or (to is None and adds)
    ]
    found += [
        _variant("bf16", 4096, centered, adds, to, kept=kept, kind=kind)
        for centered in (False, True)
        for adds in (False, True)
        for to in ("int8", "fp8")
        for kind, kept in (("rows", True), ("fixed", False), ("fixed", True))
    ]
    wide = [(dtype, centered) for dtype in ("fp16", "bf16", "fp32") for centered in (False, True)]
    return found + [_variant(dtype, _WIDEST_HELD + 16, centered, True, None) for dtype, centered in wide]


def _variant(
    dtype: str, width: int, centered: bool, adds: bool, to: str | None, *, kept: bool = False, kind: str = "rows"
) -> KernelVariant:
    is_wide = width > _WIDEST_HELD
    block, warps = (_PIECE, _PIECE_WARPS) if is_wide else row_launch(width)
    used = {
        "x": f"*{dtype}",
        "residual": f"*{dtype}" if adds else "",
        "scale": f"*{dtype}",
        "bias": f"*{dtype}" if centered else "",
        "y": f"*{dtype}" if to is None or kept else "",
        "total": f"*{dtype}" if adds else "",
    }
    if not is_wide:
        used["values"] = {None: "", "int8": "*i8", "fp8": "*u8"}[to]
        used["row_scales"] = "*fp32" if to else ""
    pointers = {name: kind for name, kind in used.items() if kind}
    absent = dict.fromkeys(name for name, kind in used.items() if not kind)
    terms = {"CENTERED": centered, "ADDS": adds, "HAS_BIAS": centered}
    name = f"{'add_' if adds else ''}{'layer' if centered else 'rms'}_norm"
    also = f"{' by a fixed scale' if kind == 'fixed' else ''}{' and as it is' if kept else ''}"
    return KernelVariant(
        _norm_in_pieces if is_wide else _norm,
        f"{name} {dtype}{f' to {to}{also}' if to else ''}, {'in pieces' if is_wide else f'{width} wide'}",
        {**pointers, "x_stride": "i32", "width": "i32", "epsilon": "fp32"},
        {**absent, **terms, "PIECE": block}
        if is_wide
        else {**absent, **terms, "QUANTIZES": kind if to else "", "TO_FP8": to == "fp8", "BLOCK": block},
        num_warps=warps,
        aligned=(*pointers, "x_stride", "width"),
    )

"""Quantization of activations to 8 bits: every row by its own largest magnitude, or all by one fixed scale.

The numbers are those of the dialect's `QuantizeRows` and of ONNX's `QuantizeLinear`, bit for bit. FP8 numbers are made
and read with integer arithmetic, as bytes: half of the chips know no E4M3 in the form without infinities.
"""

# Triton reads the types of a kernel's arguments when it is launched: annotations say only what is a constant.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferencex.runtime.backends.triton.kernels.variant import KernelVariant

_VANISHING = tl.constexpr(2.0**-100)
_LARGEST_INT8 = tl.constexpr(127.0)
_LARGEST_FP8 = tl.constexpr(448.0)
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: what is added to it loses its fraction, ties to even
_FP8_SMALLEST_NORMAL = tl.constexpr(2.0**-6)
_FP8_SUBNORMALS_PER_UNIT = tl.constexpr(512.0)
WIDEST_ROW = 32768
_PIECE = 4096  # of wider rows
_PIECE_WARPS = 8


@triton.jit
def round_to_int8(x, low: tl.constexpr):
    """Round float32 to int8, ties to even, after clipping it to `low .. 127`.

    Clipping comes first also to keep a compiler from fusing the product that `x` may be with the addition.
    """
    clipped = tl.minimum(tl.maximum(x, low), _LARGEST_INT8)
    return ((clipped + _ROUNDER) - _ROUNDER).to(tl.int8)


@triton.jit
def encode_e4m3(x):
    """Round finite float32 to FP8 E4M3 (Micikevicius et al. 2022), ties to even, saturating; its bits as uint8."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), _LARGEST_FP8)
    unsigned = magnitude.to(tl.int32, bitcast=True)
    # Three of 23 bits of mantissa stay; the exponent's bias goes from 127 to 7.
    normal = ((unsigned + 0x7FFFF + ((unsigned >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = ((magnitude * _FP8_SUBNORMALS_PER_UNIT + _ROUNDER) - _ROUNDER).to(tl.int32)
    return (sign | tl.where(magnitude < _FP8_SMALLEST_NORMAL, subnormal, normal)).to(tl.uint8)


@triton.jit
def decode_e4m3(bits):
    """Return the float16 that bits of FP8 E4M3, which are no NaN's, stand for; exactly.

    Shifted into place they are a float16 2^-8 times as large, for the biases differ by 8.
    """
    wide = bits.to(tl.uint16)
    placed = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return placed.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def quantize_row(x, TO_FP8: tl.constexpr):
    """Quantize one row, float32 with zeros where it is padded; return its values (int8, or bits of E4M3) and scale.

    A NaN among numbers does not reach their largest on every chip, so that finite ones are counted.
    """
    magnitudes = tl.abs(x)
    finite = tl.min((magnitudes < float("inf")).to(tl.int32), axis=0) == 1
    used, factor, scale = _row_scale(tl.max(magnitudes, axis=0), finite, TO_FP8)
    return _quantize_used(x, used, factor, TO_FP8), scale


@triton.jit
def _row_scale(largest, finite, TO_FP8: tl.constexpr):
    """Return whether the numbers of a row count, what they are multiplied by, and the row's scale."""
    used = finite & (largest >= _VANISHING)
    top = _LARGEST_FP8 if TO_FP8 else _LARGEST_INT8
    divisor = tl.where(used, largest, 1.0)
    factor = tl.math.div_rn(tl.full((), top, tl.float32), divisor)
    scale = tl.where(used, tl.math.div_rn(divisor, tl.full((), top, tl.float32)), 0.0)
    return used, factor, tl.where(finite, scale, float("nan"))


@triton.jit
def _quantize_used(x, used, factor, TO_FP8: tl.constexpr):
    """Quantize float32 of a row by its factor, to 0 where its numbers do not count."""
    scaled = tl.where(used, x, 0.0) * factor
    return encode_e4m3(scaled) if TO_FP8 else round_to_int8(scaled, -127.0)


@triton.jit
def quantize_by(x, scale, zero_point, TO_FP8: tl.constexpr):
    """Quantize float32 by one scale, float32: int8, or bits of E4M3, as saturating `QuantizeLinear` does."""
    scaled = tl.math.div_rn(x, tl.zeros_like(x) + scale)
    if TO_FP8:
        quantized = encode_e4m3(scaled)
    else:
        # Wide enough for any zero point to bring the sum back into range.
        rounded = (tl.minimum(tl.maximum(scaled, -512.0), 512.0) + _ROUNDER) - _ROUNDER
        shifted = rounded.to(tl.int32) + zero_point
        quantized = tl.minimum(tl.maximum(shifted, -128), 127).to(tl.int8)
    return quantized


@triton.jit
def _quantize_rows(x, values, scales, width, TO_FP8: tl.constexpr, BLOCK: tl.constexpr):
    """A program is a row, all of which is in registers; reads `[T, S]` once and writes a byte for each element."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    numbers = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    quantized, scale = quantize_row(numbers, TO_FP8)
    tl.store(values + row * width + column, quantized, mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _quantize_rows_in_pieces(x, values, scales, width, TO_FP8: tl.constexpr, PIECE: tl.constexpr):
    """A program is a row of any width, read once for its largest magnitude and again, from cache, to be quantized."""
    row = tl.program_id(0).to(tl.int64)
    start = row * width
    largest = tl.zeros((PIECE,), tl.float32)
    finite = tl.full((PIECE,), 1, tl.int32)
    for offset in range(0, width, PIECE):
        column = offset + tl.arange(0, PIECE)
        magnitudes = tl.abs(tl.load(x + start + column, mask=column < width, other=0.0).to(tl.float32))
        finite &= (magnitudes < float("inf")).to(tl.int32)
        largest = tl.maximum(largest, magnitudes)
    used, factor, scale = _row_scale(tl.max(largest, axis=0), tl.min(finite, axis=0) == 1, TO_FP8)
    for offset in range(0, width, PIECE):
        column = offset + tl.arange(0, PIECE)
        numbers = tl.load(x + start + column, mask=column < width, other=0.0).to(tl.float32)
        tl.store(values + start + column, _quantize_used(numbers, used, factor, TO_FP8), mask=column < width)
    tl.store(scales + row, scale)


@triton.jit
def _quantize_fixed(x, values, scale, zero_point, size, TO_FP8: tl.constexpr, BLOCK: tl.constexpr):
    """A program is BLOCK elements of the flat tensor."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    numbers = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    quantized = quantize_by(numbers, tl.load(scale).to(tl.float32), zero_point, TO_FP8)
    tl.store(values + place, quantized, mask=inside)


@dataclass(frozen=True, eq=False)
class Quantization:
    """How rows become 8-bit numbers.

    to:    int8 or float8_e4m3fn
    scale: one for all of them, float32 `[1]`; None where every row has its own
    """

    to: torch.dtype
    scale: Tensor | None = None

    @property
    def kind(self) -> str:
        """What kernels are told: "rows" or "fixed"."""
        return "rows" if self.scale is None else "fixed"

    def places(self, shape: tuple[int, int], device: torch.device) -> Quantized:
        """Return where a kernel writes values of this shape, and their scales where those are not fixed."""
        check_quantized_type(self.to)
        if self.scale is None:
            return Quantized(*empty_quantized(shape, self.to, device))
        return Quantized(torch.empty(shape, dtype=self.to, device=device), self.scale)

    def of(self, x: Tensor) -> Quantized:
        """Quantize `[T, S]`, by a kernel of its own."""
        if self.scale is None:
            return Quantized(*quantize_rows(x, self.to))
        return Quantized(quantize_fixed(x, self.scale, self.to), self.scale)


@dataclass(frozen=True)
class Quantized:
    """Rows in 8 bits: values int8 or float8_e4m3fn `[T, S]`, and float32 scales, `[T]` or one for all."""

    values: Tensor
    scales: Tensor


def row_launch(width: int) -> tuple[int, int]:
    """Return the block and the number of warps for programs that hold a row of `width` elements in registers."""
    if not 0 < width <= WIDEST_ROW:
        raise ValueError(f"rows of {width} elements; kernels that hold a row take 1 to {WIDEST_ROW}")
    block = max(128, triton.next_power_of_2(width))
    return block, min(16, max(1, block // 512))


def empty_quantized(shape: tuple[int, int], to: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return places for values of type `to`, int8 or float8_e4m3fn, and for their rows' float32 scales."""
    check_quantized_type(to)
    values = torch.empty(shape, dtype=to, device=device)
    return values, torch.empty(shape[0], dtype=torch.float32, device=device)


def check_quantized_type(to: torch.dtype) -> None:
    """Raise ValueError for what activations are not quantized to."""
    if to not in (torch.int8, torch.float8_e4m3fn):
        raise ValueError(f"activations are quantized to int8 or float8_e4m3fn, not to {to}")


def as_bytes(values: Tensor) -> Tensor:
    """Return values as kernels that know no FP8 take them: int8, or the bits of E4M3 as uint8."""
    return values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values


def quantize_rows(x: Tensor, to: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize `[T, S]` as `QuantizeRows` says; return values `[T, S]` of type `to` and float32 scales `[T]`."""
    rows, width = _checked(x)
    values, scales = empty_quantized((rows, width), to, x.device)
    is_fp8 = to == torch.float8_e4m3fn
    if rows and width > WIDEST_ROW:
        _quantize_rows_in_pieces[(rows,)](
            x, as_bytes(values), scales, width, TO_FP8=is_fp8, PIECE=_PIECE, num_warps=_PIECE_WARPS
        )
    elif rows:
        block, warps = row_launch(width)
        _quantize_rows[(rows,)](x, as_bytes(values), scales, width, TO_FP8=is_fp8, BLOCK=block, num_warps=warps)
    return values, scales


def quantize_fixed(x: Tensor, scale: Tensor, to: torch.dtype, zero_point: int = 0) -> Tensor:
    """Quantize `[T, S]` with one scale, which `scale` holds alone, as saturating `QuantizeLinear` does."""
    check_quantized_type(to)
    rows, width = _checked(x)
    is_fp8 = to == torch.float8_e4m3fn
    if scale.numel() != 1 or scale.device != x.device:
        raise ValueError(f"a scale of shape {list(scale.shape)} on {scale.device}; expected one number on {x.device}")
    if not -128 <= zero_point <= (0 if is_fp8 else 127):
        raise ValueError(f"zero point {zero_point} does not fit {to}")
    values = torch.empty((rows, width), dtype=to, device=x.device)
    if x.numel():
        block = 1024
        grid = (triton.cdiv(x.numel(), block),)
        _quantize_fixed[grid](x, as_bytes(values), scale, zero_point, x.numel(), TO_FP8=is_fp8, BLOCK=block)
    return values


def _checked(x: Tensor) -> tuple[int, int]:
    if x.dim() != 2 or not x.is_contiguous() or not x.is_floating_point():
        raise ValueError(
            f"{x.dtype} {list(x.shape)} with strides {x.stride()}; expected contiguous floats [rows, width]"
        )
    return x.shape[0], x.shape[1]


def variants() -> list[KernelVariant]:
    """Return what launches compile."""
    found = []
    for dtype in ("fp16", "bf16", "fp32"):
        for name, stored in (("int8", "*i8"), ("fp8", "*u8")):
            for width in (4096, 32768) if dtype == "bf16" else (4096,):
                block, warps = row_launch(width)
                found.append(
                    KernelVariant(
                        _quantize_rows,
                        f"quantize_rows {dtype} to {name}, {width} wide",
                        {"x": f"*{dtype}", "values": stored, "scales": "*fp32", "width": "i32"},
                        {"TO_FP8": name == "fp8", "BLOCK": block},
                        num_warps=warps,
                        aligned=("x", "values", "scales", "width"),
                    )
                )
            found.append(
                KernelVariant(
                    _quantize_rows_in_pieces,
                    f"quantize_rows {dtype} to {name}, in pieces",
                    {"x": f"*{dtype}", "values": stored, "scales": "*fp32", "width": "i32"},
                    {"TO_FP8": name == "fp8", "PIECE": _PIECE},
                    num_warps=_PIECE_WARPS,
                    aligned=("x", "values", "scales", "width"),
                )
            )
            found.append(
                KernelVariant(
                    _quantize_fixed,
                    f"quantize_fixed {dtype} to {name}",
                    {"x": f"*{dtype}", "values": stored, "scale": "*fp32", "zero_point": "i32", "size": "i32"},
                    {"TO_FP8": name == "fp8", "BLOCK": 1024},
                    aligned=("x", "values", "scale", "size"),
                )
            )
    return found

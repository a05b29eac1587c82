"""Small numbers out of packed words, in registers: the device functions that quantized matrix products share.

A tile of words is int16 `[rows, slice]`. Every word holds `slices = 16 / bits` numbers that lie `slice` features apart
(weights/layout.py), so that number `J` of all words is a tile `[rows, slice]` of the weight with its features in
order, and a product is `slices` dots of whole tiles: nothing is interleaved, and no element changes its thread.

Conversion instructions run at a fraction of the rate of arithmetic. So numbers are not converted: their bits are put
into the mantissa (integers) or into exponent and mantissa (floats) of a number of the compute type, two of which lie
in a register (Kim et al. 2022, "Who says elephants can't run"; Frantar et al. 2024, "MARLIN", section 3.4):

    int4  float16   0x6400 | q         = 1024 + q          minus (1024 + z)
                    0x6400 | q << 4    = 1024 + 16 q       times 1/16, minus (64 + z): two of four need no shift
          bfloat16  0x4300 | q         = 128 + q           minus (128 + z)
    int8  float16   0x6400 | u         = 1024 + u          minus (1024 + z)
          bfloat16  0x4300 | (u & 127) = 128 + u % 128     plus (-128 or -256), which is 0xC380 ^ (u & 128)
    e4m3  sign, and the other bits below it   times 2^8 (float16), 2^120 (bfloat16)
    e2m1  likewise                            times 2^14, 2^126; or times a scale that has the power in it

Every step is exact, subnormal numbers included; the NaN codes of e4m3 are the only ones that come out wrong (480).
Integers are stored with their offset, `u = q + 8` or `q + 128` for signed ones (weights/layout.py).

Instructions a weight, for pairs of 16 bits: int4 1.1 (float16) or 1.4 (bfloat16), int8 1 or 1.75, e4m3 2.3, e2m1 2.4,
against the `132 SM * 128 lanes * 1.75 GHz / (4.8 TB/s / bytes a weight)` = 3.1 (4 bits) or 6.2 (8 bits) that an H200
can issue while it reads one. LLVM makes pairs of logic and arithmetic on sm_90 but not on sm_80, and of shifts on
neither: on CUDA it is assembly. AMD's compiler pairs float16; its chips have no bfloat16 arithmetic, so there float32
is used, whose upper half is the result.
"""

# Triton reads the types of a kernel's arguments when it is launched: annotations say only what is a constant.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# Constants have capital letters; and what a conditional expression chooses between must have one type.
# ruff: noqa: SIM108, SIM300

from __future__ import annotations

import functools
from typing import Literal

import torch
import triton
import triton.language as tl

from inferencex.runtime.backends.triton.kernels.pair_assembly import (
    ADD_BFLOAT16,
    INT4_BFLOAT16,
    INT4_FLOAT16,
    INT8_BFLOAT16,
    INT8_FLOAT16,
    SHIFT_RIGHT,
    SMALL_FLOAT,
    SMALL_FLOAT_BITS,
)

Chip = Literal["cuda", "hip", "interpreter"]
"""What unpacking is written for: the constant `CHIP` of kernels."""


@functools.cache
def chip() -> Chip:
    """Return what kernels of this process run on."""
    if triton.knobs.runtime.interpret:
        return "interpreter"
    return "cuda" if torch.version.hip is None else "hip"


@triton.jit
def unpack_slice(words, zero, J: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr, CHIP: tl.constexpr):
    """Return number `J` of each word, less its zero point: `[rows, slice]` of DTYPE.

    words:  int16 `[rows, slice]`
    zero:   zero points with the offset of the stored integers, DTYPE, `[rows, 1]` or as the words; None for symmetric
            numbers (8 for int4, 128 for int8)
    FORMAT: "int4", "int8", "e4m3" or "e2m1"
    DTYPE:  float16, bfloat16 or float32, in which the result is exact
    CHIP:   what `chip()` says where the kernel is launched
    """
    if FORMAT == "int4" or FORMAT == "int8":
        if DTYPE == tl.float32:
            return _integer_float32(words, zero, J, FORMAT)
        elif DTYPE == tl.float16:
            return _integer_float16(words, zero, J, FORMAT, CHIP)
        elif CHIP == "cuda":
            return _integer_bfloat16(words, zero, J, FORMAT)
        else:
            return _upper_half(_integer_float32(words, zero, J, FORMAT))
    else:
        return _small_float(words, J, FORMAT, DTYPE, CHIP)


@triton.jit
def float_zeros(raw, DTYPE: tl.constexpr):
    """Return stored zero points, uint8, as DTYPE, which holds them exactly."""
    return raw.to(tl.float32).to(DTYPE)


@triton.jit
def float_scales(raw, SCALES: tl.constexpr):
    """Return scales as float32: numbers (`SCALES` = "float"), or codes in uint8 (weights/scale_formats.py)."""
    if SCALES == "e4m3":
        wide = raw.to(tl.int16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    elif SCALES == "e5m3":
        return ((raw.to(tl.int32) << 20) + (106 << 23)).to(tl.float32, bitcast=True)
    elif SCALES == "e8m0":
        exponent = raw.to(tl.int32)
        return tl.where(exponent == 0, 0x00400000, exponent << 23).to(tl.float32, bitcast=True)
    else:
        return raw.to(tl.float32)


@triton.jit
def has_folded_scales(FORMAT: tl.constexpr, SCALES: tl.constexpr, DTYPE: tl.constexpr):
    """Tell whether `scaled_small_float` is there for a format."""
    return FORMAT == "e2m1" and (SCALES == "e5m3" or SCALES == "e8m0") and DTYPE != tl.float32


def folded_factor(weight_format: str, scales: str, dtype: torch.dtype) -> float:
    """Return what products of `scaled_small_float` are too small by; 1 where it is not there."""
    if weight_format != "e2m1" or scales not in ("e5m3", "e8m0") or dtype == torch.float32:
        return 1.0
    if dtype == torch.bfloat16:
        return 2.0**16
    return 2.0**8 if scales == "e5m3" else 1.0


@triton.jit
def folded_scales(codes, SCALES: tl.constexpr, DTYPE: tl.constexpr):
    """Return 2^110 (bfloat16), 2^6 or, of powers of two, 2^14 (float16) times the scales that codes stand for.

    Those are the powers that the bits of a 4-bit float are short of, 2^126 and 2^14, but for `folded_factor`, without
    which the largest scales would overflow. So a code is made a number by a shift and an addition.
    """
    wide = codes.to(tl.int16)
    if DTYPE == tl.bfloat16:
        if SCALES == "e5m3":
            bits = (wide << 4) + (216 << 7)
        else:
            bits = (wide << 7) + (110 << 7)
    elif SCALES == "e5m3":
        bits = wide << 7
    else:
        bits = tl.maximum(wide - 98, 0) << 10
    return bits.to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def scaled_small_float(words, scale, J: tl.constexpr, DTYPE: tl.constexpr, CHIP: tl.constexpr):
    """Return number `J` of each word, a 4-bit float, times its scale, by `folded_scales`: `[rows, slice]` of DTYPE.

    One multiplication brings the bits to where they stand for a number, and scales it. It is exact: two bits times
    four are six.
    """
    if CHIP == "cuda":
        DOWN: tl.constexpr = 6 if DTYPE == tl.bfloat16 else 3
        return _pairs(SMALL_FLOAT_BITS(12 - 4 * J, DOWN, 0x7000 >> DOWN), words, DTYPE) * scale
    elif DTYPE == tl.bfloat16:
        left = words << (12 - 4 * J)
        bits = (left & -0x8000) | ((left >> 6) & 0x1C0)
        wide = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        return _upper_half(wide * scale.to(tl.float32))
    else:
        left = words << (12 - 4 * J)
        bits = (left & -0x8000) | ((left >> 3) & 0xE00)
        return bits.to(tl.float16, bitcast=True) * scale


@triton.jit
def _integer_float32(words, zero, J: tl.constexpr, FORMAT: tl.constexpr):
    """Return the integers as float32: their bits as the mantissa of 2^23, which one subtraction takes off again."""
    BITS: tl.constexpr = 4 if FORMAT == "int4" else 8
    MASK: tl.constexpr = (1 << BITS) - 1
    number = (words >> (BITS * J)).to(tl.int32) & MASK
    wide = (number | 0x4B000000).to(tl.float32, bitcast=True)
    if zero is None:
        return wide - (8388608.0 + (1 << (BITS - 1)))
    else:
        return wide - (zero.to(tl.float32) + 8388608.0)


@triton.jit
def _integer_float16(words, zero, J: tl.constexpr, FORMAT: tl.constexpr, CHIP: tl.constexpr):
    IS_HIGH: tl.constexpr = FORMAT == "int4" and J % 2 == 1  # the upper nibble of a byte stays where it is
    MIDDLE: tl.constexpr = 8 if FORMAT == "int4" else 128
    START: tl.constexpr = 64 if IS_HIGH else 1024
    if zero is None:
        less = tl.full(words.shape, -(START + MIDDLE), tl.float16)
    else:
        less = (-START - zero).broadcast_to(words.shape)
    if CHIP == "cuda":
        if FORMAT == "int8":
            return _pairs2(INT8_FLOAT16(J), words, less, tl.float16)
        if J >= 2:
            words = _pairs(SHIFT_RIGHT(8), words, tl.int16)
        return _pairs2(INT4_FLOAT16(J), words, less, tl.float16)
    else:
        if FORMAT == "int8":
            bits = ((words >> (8 * J)) & 0xFF) | 0x6400
        elif IS_HIGH:
            bits = ((words >> (8 * (J // 2))) & 0xF0) | 0x6400
        else:
            bits = ((words >> (8 * (J // 2))) & 0xF) | 0x6400
        wide = bits.to(tl.float16, bitcast=True)
        if IS_HIGH:
            return wide * 0.0625 + less
        else:
            return wide + less


@triton.jit
def _integer_bfloat16(words, zero, J: tl.constexpr, FORMAT: tl.constexpr):
    """Return the integers as bfloat16, by CUDA's assembly."""
    if FORMAT == "int4":
        if zero is None:
            less = tl.full(words.shape, -136.0, tl.bfloat16)
        else:
            less = (-128 - zero).broadcast_to(words.shape)
        return _pairs2(INT4_BFLOAT16(J), words, less, tl.bfloat16)
    else:
        signed = _pairs(INT8_BFLOAT16(J), words, tl.bfloat16)
        if zero is None:
            return signed
        else:
            return _pairs2(ADD_BFLOAT16(), signed, (128 - zero).broadcast_to(words.shape), tl.bfloat16)


@triton.jit
def _pairs(ASSEMBLY: tl.constexpr, words, DTYPE: tl.constexpr):
    return tl.inline_asm_elementwise(ASSEMBLY, "=r,r", [words], dtype=DTYPE.value, is_pure=True, pack=2)


@triton.jit
def _pairs2(ASSEMBLY: tl.constexpr, words, added, DTYPE: tl.constexpr):
    return tl.inline_asm_elementwise(ASSEMBLY, "=r,r,r", [words, added], dtype=DTYPE.value, is_pure=True, pack=2)


@triton.jit
def _upper_half(wide):
    """Return float32 that bfloat16 can hold as bfloat16: without rounding, which would cost several instructions."""
    return (wide.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _small_float(words, J: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr, CHIP: tl.constexpr):
    """Return floats of 4 or 8 bits: sign to the top, the rest to where exponent and mantissa meet, times a power."""
    LEFT: tl.constexpr = 12 - 4 * J if FORMAT == "e2m1" else 8 - 8 * J
    IS_BFLOAT16: tl.constexpr = DTYPE == tl.bfloat16
    # From below the sign to exponent and mantissa of 5 and 10 bits, or 8 and 7.
    DOWN: tl.constexpr = (6 if IS_BFLOAT16 else 3) if FORMAT == "e2m1" else (4 if IS_BFLOAT16 else 1)
    MASK: tl.constexpr = (0x7000 if FORMAT == "e2m1" else 0x7F00) >> DOWN
    if CHIP == "cuda" and DTYPE != tl.float32:
        FACTOR: tl.constexpr = (
            (0x7E80 if FORMAT == "e2m1" else 0x7B80) if IS_BFLOAT16 else (0x7400 if FORMAT == "e2m1" else 0x5C00)
        )
        return _pairs(SMALL_FLOAT(LEFT, DOWN, MASK, IS_BFLOAT16, FACTOR), words, DTYPE)
    else:
        left = words << LEFT
        bits = (left & -0x8000) | ((left >> DOWN) & MASK)
        if IS_BFLOAT16:
            wide = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
            POWER: tl.constexpr = 2.0**126 if FORMAT == "e2m1" else 2.0**120
            return _upper_half(wide * POWER)
        else:
            UP: tl.constexpr = 16384.0 if FORMAT == "e2m1" else 256.0
            return (bits.to(tl.float16, bitcast=True) * UP).to(DTYPE)

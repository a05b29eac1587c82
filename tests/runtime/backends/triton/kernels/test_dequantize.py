"""Numbers out of words: every word there is, against what its numbers are."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from inferencex.runtime.backends.triton.kernels.dequantize import (
    chip,
    float_scales,
    float_zeros,
    folded_factor,
    folded_scales,
    scaled_small_float,
    unpack_slice,
)
from inferencex.runtime.backends.triton.weights.scale_formats import without_sign

_EVERY_WORD = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).reshape(512, 128)
_TYPES = {torch.float16: tl.float16, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@triton.jit
def _unpack(
    words_ptr,
    zeros_ptr,
    y_ptr,
    ROWS: tl.constexpr,
    J: tl.constexpr,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
    CHIP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    places = rows[:, None] * 128 + tl.arange(0, 128)[None, :]
    zero = None
    if HAS_ZEROS:
        zero = float_zeros(tl.load(zeros_ptr + rows), DTYPE)[:, None]
    tl.store(y_ptr + places, unpack_slice(tl.load(words_ptr + places), zero, J, FORMAT, DTYPE, CHIP))


@triton.jit
def _scales(raw_ptr, y_ptr, SCALES: tl.constexpr):
    place = tl.arange(0, 256)
    tl.store(y_ptr + place, float_scales(tl.load(raw_ptr + place), SCALES))


@triton.jit
def _scaled(
    words_ptr, codes_ptr, y_ptr, J: tl.constexpr, SCALES: tl.constexpr, DTYPE: tl.constexpr, CHIP: tl.constexpr
):
    rows = tl.program_id(0) * 32 + tl.arange(0, 32)
    places = rows[:, None] * 128 + tl.arange(0, 128)[None, :]
    words = tl.load(words_ptr + places)
    scale = folded_scales(tl.load(codes_ptr + rows), SCALES, DTYPE)[:, None].broadcast_to(words.shape)
    tl.store(y_ptr + places, scaled_small_float(words, scale, J, DTYPE, CHIP))


def _codes(place: int, bits: int) -> np.ndarray:
    return (_EVERY_WORD.numpy().view(np.uint16) >> (bits * place)) & ((1 << bits) - 1)


def _run(device: str, place: int, format: str, dtype: torch.dtype, zeros: torch.Tensor | None = None) -> torch.Tensor:
    y = torch.empty(512, 128, dtype=dtype, device=device)
    _unpack[(16,)](
        _EVERY_WORD.to(device),
        None if zeros is None else zeros.to(device),
        y,
        ROWS=32,
        J=place,
        FORMAT=format,
        DTYPE=_TYPES[dtype],
        CHIP=chip(),
        HAS_ZEROS=zeros is not None,
    )
    return y.cpu().to(torch.float64)


@pytest.mark.parametrize("dtype", _TYPES)
@pytest.mark.parametrize(("format", "bits"), [("int4", 4), ("int8", 8)])
def test_integers_are_exact(device: str, format: str, bits: int, dtype: torch.dtype) -> None:
    zeros = (torch.arange(512) % (1 << bits)).to(torch.uint8)
    for place in range(16 // bits):
        codes = torch.from_numpy(_codes(place, bits).astype(np.float64))
        assert torch.equal(_run(device, place, format, dtype), codes - (1 << (bits - 1)))
        assert torch.equal(_run(device, place, format, dtype, zeros), codes - zeros.to(torch.float64)[:, None])


@pytest.mark.parametrize("dtype", _TYPES)
@pytest.mark.parametrize(
    ("format", "bits", "number"), [("e2m1", 4, ml_dtypes.float4_e2m1fn), ("e4m3", 8, ml_dtypes.float8_e4m3fn)]
)
def test_floats_are_exact(device: str, format: str, bits: int, number: type[np.generic], dtype: torch.dtype) -> None:
    for place in range(16 // bits):
        expected = _codes(place, bits).astype(np.uint8).view(number).astype(np.float64)
        found = _run(device, place, format, dtype).numpy()
        is_number = ~np.isnan(expected)
        assert is_number.mean() > 0.98
        np.testing.assert_array_equal(found[is_number], expected[is_number])


def test_codes_of_scales(device: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    for name, number in (("e4m3", ml_dtypes.float8_e4m3fn), ("e8m0", ml_dtypes.float8_e8m0fnu)):
        found = torch.empty(256, device=device)
        _scales[(1,)](torch.from_numpy(codes).to(device), found, SCALES=name)
        expected = codes.view(number).astype(np.float32)
        is_number = ~np.isnan(expected)
        np.testing.assert_array_equal(found.cpu().numpy()[is_number], expected[is_number])
    found = torch.empty(256, device=device)
    e4m3 = torch.arange(1, 127, dtype=torch.uint8)
    raw = torch.cat((without_sign(e4m3), torch.zeros(130, dtype=torch.uint8)))
    _scales[(1,)](raw.to(device), found, SCALES="e5m3")
    assert torch.equal(found[:126].cpu(), e4m3.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scales", ["e5m3", "e8m0"])
def test_scaling_along_is_exact(device: str, scales: str, dtype: torch.dtype) -> None:
    """Every number times every scale; of powers of two those that float16 has."""
    if scales == "e5m3":
        stored = torch.arange(1, 127, dtype=torch.uint8)
        codes, numbers = without_sign(stored), stored.view(torch.float8_e4m3fn)
    else:
        codes = torch.arange(106, 128, dtype=torch.uint8)
        numbers = codes.view(torch.float8_e8m0fnu)
    of_row = torch.arange(512) % len(codes)
    factors = numbers.double()[of_row]
    for place in range(4):
        y = torch.empty(512, 128, dtype=dtype, device=device)
        codes_of_row = codes[of_row].to(device)
        _scaled[(16,)](
            _EVERY_WORD.to(device), codes_of_row, y, J=place, SCALES=scales, DTYPE=_TYPES[dtype], CHIP=chip()
        )
        exact = _codes(place, 4).astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        found = y.cpu().double() * folded_factor("e2m1", scales, dtype)
        assert torch.equal(found, torch.from_numpy(exact) * factors[:, None])

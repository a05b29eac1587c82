"""Numbers out of words: every word there is, against what its numbers are."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from inferencex.runtime.backends.triton.kernels.dequantize import chip, float_scales, float_zeros, unpack_slice

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

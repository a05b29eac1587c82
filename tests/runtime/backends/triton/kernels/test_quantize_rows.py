from __future__ import annotations

import numpy as np
import pytest
import torch

from inferencex.formats.dialect.reference import quantize_rows as defined
from inferencex.formats.dtypes import DataType
from inferencex.runtime.backends.triton.kernels import quantize_rows as module
from inferencex.runtime.backends.triton.kernels.quantize_rows import quantize_fixed, quantize_rows

TYPES = {torch.int8: DataType.INT8, torch.float8_e4m3fn: DataType.FLOAT8E4M3FN}


def as_bytes(values: torch.Tensor) -> np.ndarray:
    return values.view(torch.uint8).cpu().numpy()


def check(x: torch.Tensor, to: torch.dtype, device: str) -> None:
    values, scales = quantize_rows(x.to(device), to)
    expected_values, expected_scales = defined(x.float().numpy(), TYPES[to])
    assert values.dtype == to and scales.dtype == torch.float32
    assert np.array_equal(scales.cpu().numpy(), expected_scales, equal_nan=True)
    assert np.array_equal(as_bytes(values), expected_values.view(np.uint8))


@pytest.mark.parametrize("to", TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 128), (4, 1000), (2, 5000)])
def test_every_bit_is_the_dialects(device: str, shape: tuple[int, int], dtype: torch.dtype, to: torch.dtype) -> None:
    random = np.random.default_rng(shape[1])
    spread = 10.0 ** random.uniform(-3, 3, (shape[0], 1))
    check(torch.from_numpy(random.standard_normal(shape) * spread).to(dtype), to, device)


@pytest.mark.parametrize("to", TYPES)
def test_midpoints_go_to_the_even_neighbour(device: str, to: torch.dtype) -> None:
    """With the largest in the row, the factor is 1: what is rounded is the number itself."""
    if to == torch.int8:
        numbers = np.arange(-126.5, 127.5, 0.5)
    else:
        codes = np.arange(0, 127, dtype=np.uint8)
        exact = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
        middles = (exact[1:] + exact[:-1]) / 2
        numbers = np.concatenate([exact, middles, np.nextafter(middles, 0), np.nextafter(middles, 999)])
        numbers = np.concatenate([numbers, -numbers])
    largest = 127.0 if to == torch.int8 else 448.0
    check(torch.from_numpy(np.append(numbers, largest).astype(np.float32))[None], to, device)


@pytest.mark.parametrize("to", TYPES)
def test_rows_without_numbers(device: str, to: torch.dtype) -> None:
    rows = torch.ones(7, 40)
    rows[0] = 0
    rows[1, 3] = float("nan")
    rows[2, 39] = float("inf")
    rows[3, 0] = -float("inf")
    rows[4] = 2.0**-101
    rows[5] = 2.0**-100
    rows[6, :20] = 3e38
    check(rows, to, device)
    _, scales = quantize_rows(rows.to(device), to)
    assert torch.isnan(scales[1:4]).all() and (scales[[0, 4]] == 0).all() and (scales[5:] > 0).all()


@pytest.mark.parametrize("to", TYPES)
@pytest.mark.parametrize("width", [32769, 36864, 53248])
def test_rows_wider_than_registers_hold(device: str, width: int, to: torch.dtype) -> None:
    """In pieces, with the largest in any of them, and what is not finite in the last."""
    rows = torch.randn(7, width, generator=torch.Generator().manual_seed(width)).to(torch.float16)
    rows[0, 0], rows[1, width // 2], rows[2, -1] = 300.0, -300.0, 300.0
    rows[3, -1], rows[4, 4095] = float("nan"), -float("inf")
    rows[5] = 0
    check(rows, to, device)


def test_wide_rows_are_quantized_as_narrow_ones_are(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5, 5000, generator=torch.Generator().manual_seed(1)).to(device)
    for to in TYPES:
        values, scales = quantize_rows(x, to)
        with monkeypatch.context() as patch:
            patch.setattr(module, "WIDEST_ROW", 4000)
            pieces, piece_scales = quantize_rows(x, to)
        assert np.array_equal(as_bytes(values), as_bytes(pieces)) and torch.equal(scales, piece_scales)


def test_no_rows(device: str) -> None:
    values, scales = quantize_rows(torch.zeros(0, 8, device=device), torch.int8)
    assert values.shape == (0, 8) and scales.shape == (0,)


@pytest.mark.parametrize("zero_point", [0, 5, -128, 127])
def test_one_fixed_scale_for_int8(device: str, zero_point: int) -> None:
    x = torch.randn(5, 333, generator=torch.Generator().manual_seed(1)) * 40
    x[0, :6] = torch.tensor([1e30, -1e30, 0.25, 0.75, -0.25, -0.75])
    scale = torch.tensor([0.5])
    values = quantize_fixed(x.to(device), scale.to(device), torch.int8, zero_point)
    expected = (torch.round(x / scale) + zero_point).clamp(-128, 127).to(torch.int8)
    assert torch.equal(values.cpu(), expected)


def test_one_fixed_scale_for_fp8(device: str) -> None:
    x = torch.randn(5, 333, generator=torch.Generator().manual_seed(1)) * 100
    x[0, :2] = torch.tensor([1e30, -1e30])
    scale = torch.tensor(0.3)
    values = quantize_fixed(x.to(device), scale.to(device), torch.float8_e4m3fn)
    expected = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert np.array_equal(as_bytes(values), as_bytes(expected))


def test_what_cannot_be_quantized_is_refused(device: str) -> None:
    x = torch.zeros(4, 8, device=device)
    with pytest.raises(ValueError, match=r"not to torch\.uint8"):
        quantize_rows(x, torch.uint8)
    with pytest.raises(ValueError, match="expected contiguous floats"):
        quantize_rows(x[:, ::2], torch.int8)
    with pytest.raises(ValueError, match="expected one number"):
        quantize_fixed(x, torch.ones(2, device=device), torch.int8)
    with pytest.raises(ValueError, match="zero point 200"):
        quantize_fixed(x, torch.ones(1, device=device), torch.int8, 200)

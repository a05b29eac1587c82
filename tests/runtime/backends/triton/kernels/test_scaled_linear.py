from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inferencex.runtime.backends.triton.kernels.quantize_rows import quantize_fixed, quantize_rows
from inferencex.runtime.backends.triton.kernels.scaled_linear import scaled_linear, sums_of_rows
from inferencex.runtime.backends.triton.weights import LinearWeight, from_canonical

TYPES = [torch.int8, torch.float8_e4m3fn]
SHAPES = [  # tokens, outputs, features
    (1, 1, 1),
    (1, 70, 640),  # split features
    (2, 33, 100),
    (7, 40, 2000),  # split, with a ragged last part
    (16, 64, 512),
    (33, 65, 129),
    (70, 40, 96),
    (130, 20, 64),
]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_weight(outputs: int, features: int, to: torch.dtype, device: str, *, bias: bool = True) -> LinearWeight:
    values, scales = quantize_rows(random(outputs, features, seed=1).to(device), to)
    return from_canonical(
        values,
        scales,
        shape=(outputs, features),
        bits=8,
        number="int" if to == torch.int8 else "e4m3",
        bias=random(outputs, seed=2).to(device) if bias else None,
        layout="rows",
    )


def expected(values: Tensor, scales: Tensor, weight: LinearWeight, zero_point: int = 0) -> Tensor:
    x = (values.cpu().float().double() - zero_point) * scales.cpu().double().reshape(-1, 1)
    assert weight.scales is not None
    w = weight.values.cpu().float().double() * weight.scales.cpu().double().reshape(-1, 1) * weight.tensor_scale
    y = x @ w.T
    return y if weight.bias is None else y + weight.bias.cpu().double()


def assert_close(found: Tensor, wanted: Tensor, tolerance: float = 2e-6) -> None:
    error = (found.cpu().double() - wanted).abs().max() / wanted.abs().max()
    assert error < tolerance


@pytest.mark.parametrize("to", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(device: str, shape: tuple[int, int, int], to: torch.dtype) -> None:
    tokens, outputs, features = shape
    weight = make_weight(outputs, features, to, device)
    values, scales = quantize_rows(random(tokens, features, seed=3).to(device), to)
    found = scaled_linear(values, scales, weight, torch.float32)
    assert found.shape == (tokens, outputs)
    assert_close(found, expected(values, scales, weight))


@pytest.mark.parametrize("zero_point", [0, 3, -128])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_a_fixed_scale_with_a_zero_point(device: str, tokens: int, zero_point: int) -> None:
    weight = make_weight(50, 600, torch.int8, device, bias=False)
    scale = torch.tensor([0.02], device=device)
    values = quantize_fixed(random(tokens, 600, seed=3).to(device), scale, torch.int8, zero_point)
    sums = sums_of_rows(weight) if zero_point else None
    found = scaled_linear(values, scale, weight, torch.float32, zero_point=zero_point, weight_sums=sums)
    assert_close(found, expected(values, scale, weight, zero_point))


@pytest.mark.parametrize("to", TYPES)
def test_a_factor_of_all_scales_and_half_precision(device: str, to: torch.dtype) -> None:
    values, scales = quantize_rows(random(60, 90, seed=1).to(device), to)
    halves = scales.half()
    number = "int" if to == torch.int8 else "e4m3"
    weight = from_canonical(values, halves, shape=(60, 90), bits=8, number=number, tensor_scale=0.37, layout="rows")
    x, x_scales = quantize_rows(random(9, 90, seed=3).to(device), to)
    out = torch.empty(9, 60, dtype=torch.float16, device=device)
    assert scaled_linear(x, x_scales, weight, torch.float16, out=out) is out
    assert_close(out, expected(x, x_scales, weight), 1e-3)


def test_integer_sums_are_exact(device: str) -> None:
    """Largest products of one sign, over more features than float32 counts."""
    features = 2048
    values = torch.full((3, features), 127, dtype=torch.int8, device=device)
    weights = torch.full((32, features), -128, dtype=torch.int8, device=device)
    weight = from_canonical(weights, torch.ones(32, device=device), shape=(32, features), bits=8, layout="rows")
    found = scaled_linear(values, torch.ones(3, device=device), weight, torch.float32)
    assert (found == -127 * 128 * features).all()


@pytest.mark.parametrize("to", TYPES)
def test_a_row_that_is_not_finite_stays_alone(device: str, to: torch.dtype) -> None:
    x = random(4, 64, seed=5)
    x[1, 7] = float("nan")
    x[3] = 0
    values, scales = quantize_rows(x.to(device), to)
    weight = make_weight(20, 64, to, device, bias=False)
    found = scaled_linear(values, scales, weight, torch.float32).cpu()
    assert torch.isnan(found[1]).all() and torch.isfinite(found[[0, 2]]).all() and (found[3] == 0).all()


def test_no_tokens(device: str) -> None:
    weight = make_weight(20, 64, torch.int8, device)
    values, scales = quantize_rows(torch.zeros(0, 64, device=device), torch.int8)
    assert scaled_linear(values, scales, weight, torch.float32).shape == (0, 20)


def test_what_does_not_belong_together_is_refused(device: str) -> None:
    weight = make_weight(20, 64, torch.int8, device)
    values, scales = quantize_rows(random(4, 64, seed=1).to(device), torch.int8)
    with pytest.raises(ValueError, match=r"expected torch\.int8 \[rows, 64\]"):
        scaled_linear(values[:, :32].contiguous(), scales, weight, torch.float32)
    with pytest.raises(ValueError, match="expected float32, one or 4"):
        scaled_linear(values, scales[:3], weight, torch.float32)
    with pytest.raises(ValueError, match="the sums of the 20 rows"):
        scaled_linear(values, scales, weight, torch.float32, zero_point=1)
    with pytest.raises(ValueError, match=r"out is torch\.float16"):
        scaled_linear(values, scales, weight, torch.float32, out=torch.zeros(4, 20, device=device).half())
    panels = from_canonical(weight.values, scales.new_ones(20), shape=(20, 64), bits=8)
    with pytest.raises(ValueError, match="in panels; expected 8-bit rows"):
        scaled_linear(values, scales, panels, torch.float32)

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inferencex.runtime.backends.triton.kernels.norms import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    normalize,
    rms_norm,
)
from inferencex.runtime.backends.triton.kernels.quantize_rows import Quantization

WIDTHS = [1, 7, 64, 80, 128, 1000, 4096, 17000]
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2 + 0.3).to(dtype)


def expected(x: Tensor, scale: Tensor, bias: Tensor | None, centered: bool) -> Tensor:
    x = x.double()
    if centered:
        x = x - x.mean(1, keepdim=True)
    y = x / torch.sqrt((x * x).mean(1, keepdim=True) + 1e-5) * scale.double()
    return y if bias is None else y + bias.double()


def assert_close(found: Tensor, wanted: Tensor) -> None:
    error = (found.cpu().double() - wanted).abs() / (1 + wanted.abs())
    assert error.max() < TOLERANCE[found.dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_of_any_width(device: str, width: int, dtype: torch.dtype) -> None:
    x, residual = (random(3, width, seed=seed, dtype=dtype) for seed in (1, 2))
    scale, bias = (random(width, seed=seed, dtype=dtype) for seed in (3, 4))
    on_device = [tensor.to(device) for tensor in (x, residual, scale, bias)]
    assert_close(rms_norm(on_device[0], on_device[2], 1e-5), expected(x, scale, None, False))
    assert_close(layer_norm(on_device[0], on_device[2], on_device[3], 1e-5), expected(x, scale, bias, True))
    for y, total, added, centered in (
        (*add_rms_norm(*on_device[:3], 1e-5), None, False),
        (*add_layer_norm(*on_device[:3], None, 1e-5), None, True),
        (*add_layer_norm(*on_device, 1e-5), bias, True),
    ):
        assert_close(total, x.double() + residual.double())
        assert_close(y, expected(total.cpu(), scale, added, centered))


@pytest.mark.parametrize("to", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("width", [48, 1000, 16500])
def test_fused_quantization_is_the_separate_one(
    device: str, width: int, centered: bool, fixed: bool, to: torch.dtype
) -> None:
    x, residual = (random(3, width, seed=seed, dtype=torch.float16).to(device) for seed in (1, 2))
    scale, bias = (random(width, seed=seed, dtype=torch.float16).to(device) for seed in (3, 4))
    terms = {"residual": residual, "bias": bias, "centered": centered}
    quantization = Quantization(to, torch.tensor([0.04], device=device) if fixed else None)
    plain = normalize(x, scale, 1e-6, **terms)
    assert plain.y is not None
    wanted = quantization.of(plain.y)
    for keep in (False, True):
        fused = normalize(x, scale, 1e-6, **terms, quantization=quantization, keep=keep)
        assert fused.quantized is not None and torch.equal(fused.total, plain.total)
        assert torch.equal(fused.y, plain.y) if keep else fused.y is None
        assert torch.equal(fused.quantized.scales, wanted.scales)
        assert torch.equal(fused.quantized.values.view(torch.uint8), wanted.values.view(torch.uint8))


def test_heads_inside_wider_rows(device: str) -> None:
    """Rows that lie apart, and a scale of another type."""
    x = random(6, 300, dtype=torch.float16)
    scale = random(80, seed=1)
    part = x.to(device)[:, 100:180]
    out = torch.empty(6, 80, dtype=torch.float16, device=device)
    assert rms_norm(part, scale.to(device), 1e-5, out=out) is out
    assert_close(out, expected(x[:, 100:180], scale, None, False))


def test_large_offsets_do_not_cancel(device: str) -> None:
    x = random(2, 512) + 3000
    scale = torch.ones(512)
    found = layer_norm(x.to(device), scale.to(device), None, 1e-5).cpu().double()
    assert (found - expected(x, scale, None, True)).abs().max() < 1e-3


def test_no_rows_and_zero_rows(device: str) -> None:
    scale = torch.ones(8, device=device)
    assert rms_norm(torch.zeros(0, 8, device=device), scale, 1e-5).shape == (0, 8)
    assert (rms_norm(torch.zeros(2, 8, device=device), scale, 1e-5) == 0).all()


def test_shapes_that_do_not_fit_are_refused(device: str) -> None:
    x = torch.zeros(4, 8, device=device)
    with pytest.raises(ValueError, match=r"scale is \[7\]"):
        rms_norm(x, torch.ones(7, device=device), 1e-5)
    with pytest.raises(ValueError, match="each row contiguous"):
        rms_norm(x[:, ::2], torch.ones(4, device=device), 1e-5)
    with pytest.raises(ValueError, match=r"residual is torch\.float16"):
        add_rms_norm(x, x.half(), torch.ones(8, device=device), 1e-5)
    with pytest.raises(ValueError, match="not written to `out`"):
        normalize(x, torch.ones(8, device=device), 1e-5, quantization=Quantization(torch.int8), out=x)

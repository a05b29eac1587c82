"""Linear layers of every format, group size and number of tokens, against dequantized weights in float64."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch

from inferencex.formats.errors import BackendError
from inferencex.formats.packing import PER_CHANNEL, Number, pack_bits
from inferencex.runtime.backends.triton.kernels import linear as module
from inferencex.runtime.backends.triton.kernels.linear import launch, linear
from inferencex.runtime.backends.triton.kernels.linear_tiles import Shape, candidates, default_config
from inferencex.runtime.backends.triton.kernels.variant import TARGETS
from inferencex.runtime.backends.triton.tuning import Config
from inferencex.runtime.backends.triton.weights import LinearWeight, from_canonical, plain

_TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def quantized(
    device: str,
    rows: int,
    features: int,
    *,
    bits: int = 4,
    group_size: int = 32,
    number: Number = "int",
    asymmetric: bool = False,
    scales: type[np.generic] = np.float16,
    bias: bool = False,
    tensor_scale: float = 1.0,
) -> tuple[LinearWeight, torch.Tensor]:
    """Return a random weight, and what it stands for in float64."""
    rng = np.random.default_rng(rows * features + bits)
    codes = rng.integers(0, 1 << bits, (rows, features)).astype(np.uint8)
    groups = 1 if group_size == PER_CHANNEL else -(-features // group_size)
    spread = features if group_size == PER_CHANNEL else group_size
    if number == "int":
        signed = not asymmetric
        numbers = codes.astype(np.float64) - (codes >> (bits - 1)).astype(np.float64) * (signed << bits)
    else:
        if number == "e4m3":
            codes &= 0xBF  # no NaN, and no more than 30
        kind = ml_dtypes.float4_e2m1fn if number == "e2m1" else ml_dtypes.float8_e4m3fn
        signed, numbers = True, codes.view(kind).astype(np.float64)
    stored = torch.from_numpy(pack_bits(codes, bits)) if bits < 8 else torch.from_numpy(codes)
    if bits == 8 and number == "e4m3":
        stored = stored.view(torch.float8_e4m3fn)
    elif bits == 8 and signed:
        stored = stored.view(torch.int8)
    zeros = None
    if asymmetric:
        zero_codes = rng.integers(0, 1 << bits, (rows, groups)).astype(np.uint8)
        zeros = torch.from_numpy(pack_bits(zero_codes, bits) if bits < 8 else zero_codes).to(device)
        numbers = numbers - np.repeat(zero_codes.astype(np.float64), spread, axis=1)[:, :features]
    factors = rng.uniform(0.25, 2, (rows, groups)).astype(scales)
    weight = numbers * np.repeat(factors.astype(np.float64), spread, axis=1)[:, :features] * tensor_scale
    codes_of_scales = torch.from_numpy(factors.view(np.uint8)) if factors.dtype.itemsize == 1 else None
    torch_scales = (
        torch.from_numpy(factors)
        if codes_of_scales is None
        else codes_of_scales.view(torch.float8_e4m3fn if scales is ml_dtypes.float8_e4m3fn else torch.float8_e8m0fnu)
    )
    made = from_canonical(
        stored.to(device),
        torch_scales.to(device),
        zeros,
        shape=(rows, features),
        bits=bits,
        number=number,
        signed=signed,
        group_size=group_size,
        tensor_scale=tensor_scale,
        bias=torch.linspace(-3, 3, rows, device=device) if bias else None,
    )
    return made, torch.from_numpy(weight)


def check(device: str, weight: LinearWeight, expected: torch.Tensor, tokens: int, dtype: torch.dtype) -> None:
    """Compare a product with the one of float64, relative to the sum of magnitudes."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, weight.in_features, generator=generator, dtype=torch.float64).to(dtype)
    y = linear(x.to(device), weight)
    assert y.dtype == dtype and y.shape == (tokens, weight.out_features)
    exact = x.to(torch.float64) @ expected.T
    if weight.bias is not None:
        exact += weight.bias.cpu().to(torch.float64)
    size = x.to(torch.float64).abs() @ expected.abs().T + 1
    assert ((y.cpu().to(torch.float64) - exact).abs() / size).max() < _TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("group_size", [PER_CHANNEL, 256, 128, 96, 64, 32, 24, 16, 7])
def test_int4(device: str, group_size: int, asymmetric: bool, tokens: int, dtype: torch.dtype) -> None:
    weight, expected = quantized(device, 40, 328, group_size=group_size, asymmetric=asymmetric)
    check(device, weight, expected, tokens, dtype)


@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("group_size", [PER_CHANNEL, 128, 64, 32, 16, 20])
@pytest.mark.parametrize("bits", [3, 5, 6, 8])
def test_other_integers(device: str, bits: int, group_size: int, asymmetric: bool, tokens: int) -> None:
    weight, expected = quantized(device, 33, 168, bits=bits, group_size=group_size, asymmetric=asymmetric, bias=True)
    check(device, weight, expected, tokens, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize(
    ("bits", "number", "group_size", "scales"),
    [
        (8, "e4m3", PER_CHANNEL, np.float32),
        (8, "e4m3", 128, np.float32),
        (4, "e2m1", 16, ml_dtypes.float8_e4m3fn),
        (4, "e2m1", 32, ml_dtypes.float8_e8m0fnu),
        (4, "e2m1", 32, np.float32),
        (4, "e2m1", 12, np.float16),
        (4, "e2m1", 64, np.float16),
        (4, "e2m1", 128, np.float16),
    ],
)
def test_floats(
    device: str, bits: int, number: Number, group_size: int, scales: type[np.generic], tokens: int, dtype: torch.dtype
) -> None:
    weight, expected = quantized(
        device, 40, 272, bits=bits, number=number, group_size=group_size, scales=scales, tensor_scale=0.375, bias=True
    )
    check(device, weight, expected, tokens, dtype)


@pytest.mark.parametrize("features", [1, 31, 127, 129, 641])
@pytest.mark.parametrize("rows", [1, 17, 130])
def test_ragged_shapes(device: str, rows: int, features: int) -> None:
    weight, expected = quantized(device, rows, features, group_size=32, asymmetric=True, bias=True)
    check(device, weight, expected, 2, torch.float32)


@pytest.mark.parametrize("splits", [2, 8])
@pytest.mark.parametrize("scaling_group", [PER_CHANNEL, 128, 64, 24])
def test_split_features(device: str, splits: int, scaling_group: int) -> None:
    weight, expected = quantized(
        device, 70, 1100, group_size=scaling_group, asymmetric=True, bias=True, tensor_scale=0.5
    )
    x = torch.randn(9, 1100, generator=torch.Generator().manual_seed(3)).to(device)
    shape, outs = Shape.of(weight, x.dtype), []
    for count in (splits, splits, 1):
        out = torch.full((9, 70), torch.nan, device=device)
        launch(x, weight, out, shape, Config.of(4, 1, BLOCK_N=64, BLOCK_T=16, SPLITS=count))
        outs.append(out.cpu())
    assert torch.equal(outs[0], outs[1])
    assert weight.bias is not None
    exact = x.cpu().double() @ expected.T + weight.bias.cpu().double()
    for out in outs:
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-3)


def test_only_the_first_part_of_a_grid_grows_with_the_tokens(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may not be more than 65535."""
    grids: list[tuple[int, int]] = []

    class Grids:
        def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *arguments, **options: None

    monkeypatch.setattr(module, "quantized_linear_kernel", Grids())
    monkeypatch.setattr(module, "add_splits_kernel", Grids())
    weight, _ = quantized(device, 64, 512)
    x = torch.zeros(70_000, 512, dtype=torch.float16, device=device)
    out = torch.empty(70_000, 64, dtype=torch.float16, device=device)
    launch(x, weight, out, Shape.of(weight, x.dtype), Config.of(BLOCK_N=64, BLOCK_T=16, SPLITS=2))
    assert grids == [(4375, 2), (70_000, 1)]


@pytest.mark.parametrize("block_t", [16, 32])
def test_tiles_cover_everything_once(device: str, block_t: int) -> None:
    weight, expected = quantized(device, 200, 128, group_size=128)
    x = torch.randn(block_t * 9 + 3, 128, generator=torch.Generator().manual_seed(4)).to(device)
    out = torch.full((x.shape[0], 200), torch.nan, device=device)
    launch(x, weight, out, Shape.of(weight, x.dtype), Config.of(4, 1, BLOCK_N=64, BLOCK_T=block_t, SPLITS=1))
    torch.testing.assert_close(out.cpu().double(), x.cpu().double() @ expected.T, rtol=1e-5, atol=1e-3)


def test_results_go_where_they_are_wanted(device: str) -> None:
    weight, _ = quantized(device, 24, 160)
    x = torch.randn(4, 200, device=device)[:, 20:180]
    wide = torch.zeros(4, 30, device=device)
    assert linear(x, weight, out=wide[:, 3:27]) is not None
    assert torch.equal(wide[:, 3:27], linear(x.contiguous(), weight))
    assert not wide[:, :3].any() and not wide[:, 27:].any()
    transposed = torch.randn(160, 4, device=device).T
    assert torch.equal(linear(transposed, weight), linear(transposed.contiguous(), weight))
    assert linear(x[:0], weight).shape == (0, 24)


@pytest.mark.parametrize("has_bias", [False, True])
def test_plain_weights(device: str, has_bias: bool) -> None:
    values, bias = torch.randn(12, 20, device=device), torch.randn(12, device=device) if has_bias else None
    weight, x = plain(values, torch.float32, bias), torch.randn(5, 20, device=device)
    expected = x @ values.T + (0 if bias is None else bias)
    torch.testing.assert_close(linear(x, weight), expected)
    out = torch.empty(5, 12, device=device)
    linear(x, weight, out=out)
    torch.testing.assert_close(out, expected)


def test_what_does_not_fit_is_refused(device: str) -> None:
    weight, _ = quantized(device, 24, 160)
    with pytest.raises(BackendError, match=r"\[24, 160\] got activations \[3, 161\]"):
        linear(torch.ones(3, 161, device=device), weight)
    with pytest.raises(BackendError, match=r"expected \[3, 24\]"):
        linear(torch.ones(3, 160, device=device), weight, out=torch.ones(3, 25, device=device))
    with pytest.raises(BackendError, match=r"not multiplied with torch\.float64"):
        linear(torch.ones(3, 160, device=device, dtype=torch.float64), weight)
    with pytest.raises(BackendError, match=r"not multiplied with torch\.float16"):
        linear(
            torch.ones(3, 4, device=device, dtype=torch.float16), plain(torch.ones(2, 4, device=device), torch.float32)
        )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 128, 4096])
def test_configurations_suit_the_shape(target: str, tokens: int) -> None:
    for rows, features in ((16, 64), (4096, 4096), (28672, 4096), (151936, 2048)):
        shape = Shape("int4", torch.bfloat16, rows, features, 128, 128, 32, True)
        options = candidates(shape, tokens, target, 132)  # type: ignore[arg-type]
        assert options[0] == default_config(shape, tokens, target, 132)  # type: ignore[arg-type]
        assert len(set(options)) == len(options) <= 90
        for option in options:
            assert option["SPLITS"] == 1 or shape.panels >= 2 * option["SPLITS"]
            assert set(option.constants) == {"BLOCK_N", "BLOCK_T", "SPLITS"}


def test_a_shape_class_says_what_matters() -> None:
    shape = Shape("int4", torch.bfloat16, 4096, 14336, 128, 128, 32, False)
    assert shape.class_for(3) == "int4 g128 z bf16 N4096 K14336 T4"

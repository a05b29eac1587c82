"""From a bundle's order to the kernels': words, offsets, groups."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inferencex.formats.errors import BackendError
from inferencex.formats.packing import PER_CHANNEL, pack_bits
from inferencex.runtime.backends.triton.weights import LinearWeight, from_canonical, layout, plain
from inferencex.runtime.backends.triton.weights.scale_formats import without_sign


def codes_of(weight: LinearWeight) -> np.ndarray:
    """Return the stored numbers of a weight, in the order of the weight, padding cut off."""
    words = weight.values.cpu().numpy().view(np.uint16)
    bits = weight.bits
    slices = [
        words >> (bits * place) & ((1 << bits) - 1) for place in range(16 // bits)
    ]  # each [..., panels, N, slice]
    panels = np.concatenate(slices, axis=-1)
    return np.concatenate(list(np.moveaxis(panels, -3, 0)), axis=-1)[..., : weight.in_features].astype(np.int64)


@pytest.mark.parametrize("features", [128, 131, 72, 40])
@pytest.mark.parametrize("bits", [3, 4, 5, 6])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("rows", [1, 5])
def test_packed_integers(device: str, bits: int, features: int, signed: bool, rows: int) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 1 << bits, (rows, features)).astype(np.uint8)
    zero_codes = rng.integers(0, 1 << bits, (rows, -(-features // 32))).astype(np.uint8)
    scales = rng.uniform(0.01, 1, zero_codes.shape).astype(np.float16)
    weight = from_canonical(
        torch.from_numpy(pack_bits(codes, bits)).to(device),
        torch.from_numpy(scales).to(device),
        torch.from_numpy(pack_bits(zero_codes, bits)).to(device),
        shape=(rows, features),
        bits=bits,
        signed=signed,
        group_size=32,
    )
    offset = (1 << (weight.bits - 1)) if signed else 0
    numbers = codes.astype(np.int64) - ((codes >> (bits - 1)).astype(np.int64) << bits if signed else 0)
    zeros = zero_codes.astype(np.int64) - ((zero_codes >> (bits - 1)).astype(np.int64) << bits if signed else 0)
    assert weight.format == ("int4" if bits <= 4 else "int8")
    np.testing.assert_array_equal(codes_of(weight), numbers + offset)
    assert weight.zero_points is not None and weight.scales is not None
    groups = zero_codes.shape[1]
    np.testing.assert_array_equal(weight.zero_points.cpu().numpy()[:groups].T, zeros + offset)
    np.testing.assert_array_equal(weight.scales.cpu().numpy()[:groups].T, scales)
    assert weight.scales.shape[0] * 32 >= weight.values.shape[0] * weight.panel


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_bytes_and_stacks(device: str, dtype: type[np.generic]) -> None:
    rng = np.random.default_rng(1)
    numbers = rng.integers(-128, 128, (3, 7, 100)).astype(np.int8)
    values = numbers if dtype is np.int8 else (numbers.astype(np.int16) + 128).astype(np.uint8)
    scales = torch.ones(3, 7, 2, device=device)
    zeros = None if dtype is np.int8 else torch.full((3, 7, 2), 128, dtype=torch.uint8, device=device)
    weight = from_canonical(
        torch.from_numpy(values).to(device), scales, zeros, shape=(3, 7, 100), bits=8, group_size=64
    )
    np.testing.assert_array_equal(codes_of(weight), numbers.astype(np.int64) + 128)
    assert weight.experts == 3 and (weight.zero_points is None) == (dtype is np.int8)


def test_large_weights_are_packed_in_pieces(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = np.random.default_rng(2).integers(0, 16, (2, 33, 77)).astype(np.uint8)
    stored, scales = torch.from_numpy(pack_bits(codes, 4)).to(device), torch.ones(2, 33, 1, device=device)
    whole = from_canonical(stored, scales, shape=(2, 33, 77), bits=4, group_size=128)
    monkeypatch.setattr(layout, "MOST_AT_ONCE", 77 * 5)
    pieces = from_canonical(stored, scales, shape=(2, 33, 77), bits=4, group_size=128)
    assert torch.equal(whole.values, pieces.values)


def test_panels_hold_whole_groups() -> None:
    assert [layout.panel_of(4, group, 1024) for group in (128, 64, 32, 16, 96, 24)] == [128, 128, 128, 64, 128, 128]
    assert [layout.panel_of(8, group, 1024) for group in (128, 64, 32, 16, 24)] == [128, 128, 64, 32, 128]


def test_scales_take_two_bytes_where_that_loses_nothing(device: str) -> None:
    values = torch.zeros(4, 64, dtype=torch.int8, device=device)
    exact = from_canonical(values, torch.full((4,), 0.125, device=device), shape=(4, 64), bits=8)
    inexact = from_canonical(values, torch.full((4,), 0.1, device=device), shape=(4, 64), bits=8)
    tiny = from_canonical(values, torch.full((4,), 2.0**-20, device=device), shape=(4, 64), bits=8)
    found = [weight.scales.dtype for weight in (exact, inexact, tiny) if weight.scales is not None]
    assert found == [torch.float16, torch.float32, torch.float32]


def test_scales_are_codes_of_another_kind(device: str) -> None:
    stored = torch.zeros(4 * 32 // 2, dtype=torch.uint8, device=device)
    scales = torch.ones(4, 2, device=device).to(torch.float8_e4m3fn)
    weight = from_canonical(stored, scales, shape=(4, 32), bits=4, number="e2m1", group_size=16, tensor_scale=0.5)
    assert weight.scales is not None and weight.scales.dtype == torch.uint8 and weight.scale_format == "e5m3"
    assert (weight.scales[:2] == 21 << 3).all() and weight.scales.shape == (8, 4)


def test_rows_are_kept(device: str) -> None:
    values = torch.randint(-128, 128, (6, 50), dtype=torch.int8, device=device)
    weight = from_canonical(values, torch.ones(6, device=device), shape=(6, 50), bits=8, layout="rows")
    assert torch.equal(weight.values, values) and weight.layout == "rows" and weight.is_per_channel
    assert weight.nbytes == 6 * 50 + 6 * 2


def test_what_does_not_belong_together_is_refused(device: str) -> None:
    values, scales = torch.zeros(64, dtype=torch.uint8, device=device), torch.ones(4, device=device)
    with pytest.raises(BackendError, match=r"64 of torch.uint8, expected 66"):
        from_canonical(values, scales, shape=(4, 33), bits=4)
    with pytest.raises(BackendError, match=r"scales .* expected 8 floats"):
        from_canonical(values, scales, shape=(4, 32), bits=4, group_size=16)
    with pytest.raises(BackendError, match="zero points"):
        from_canonical(values, scales, scales, shape=(4, 32), bits=4)
    with pytest.raises(BackendError, match="bias"):
        from_canonical(values, scales, shape=(4, 32), bits=4, bias=torch.ones(5))
    with pytest.raises(BackendError, match="cannot be multiplied as such"):
        from_canonical(values, scales, shape=(4, 32), bits=4, layout="rows", group_size=PER_CHANNEL)
    with pytest.raises(BackendError, match="cannot be made"):
        plain(torch.ones(3), torch.float16)


@pytest.mark.parametrize("exponent", [-100, -20, 0, 30, 100])
def test_powers_of_two_lie_around_one(device: str, exponent: int) -> None:
    """Half precision holds them then, however large or small all of them are."""
    values = torch.zeros(4 * 64 // 2, dtype=torch.uint8, device=device)
    codes = torch.arange(8, dtype=torch.uint8).view(4, 2) + (127 + exponent - 7)
    scales = codes.view(torch.float8_e8m0fnu).to(device)
    weight = from_canonical(values, scales, shape=(4, 64), bits=4, number="e2m1", group_size=32)
    assert weight.scales is not None and weight.scale_format == "e8m0"
    kept = weight.scales[:2].cpu().view(torch.float8_e8m0fnu).float()
    assert kept.max() == 1 and torch.equal(kept.half().float(), kept)
    assert torch.equal(kept.double() * weight.tensor_scale, 2.0 ** (codes.T.double() - 127))


def test_e4m3_without_its_sign_is_the_same_number() -> None:
    codes = torch.arange(1, 127, dtype=torch.uint8)
    found = without_sign(codes)
    numbers = (1 + (found & 7) / 8) * torch.exp2((found >> 3).float() - 21)
    assert torch.equal(numbers, codes.view(torch.float8_e4m3fn).float())
    assert without_sign(torch.zeros(1, dtype=torch.uint8)) == 0


@pytest.mark.parametrize("features", [64, 70])
def test_groups_whose_scale_is_zero_are_zeros(device: str, features: int) -> None:
    from inferencex.runtime.backends.triton.kernels.linear import linear

    random = torch.Generator().manual_seed(1)
    groups = -(-features // 16)
    values = torch.randint(0, 256, (20 * features // 2,), dtype=torch.uint8, generator=random)
    numbers = torch.rand(20, groups, generator=random) * (torch.rand(20, groups, generator=random) > 0.4)
    scales = numbers.to(torch.float8_e4m3fn)
    weight = from_canonical(
        values.to(device), scales.to(device), shape=(20, features), bits=4, number="e2m1", group_size=16
    )
    assert weight.scale_format == "e5m3"
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.stack((values & 15, values >> 4), -1).view(20, features)
    exact = table[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0)
    exact = exact * scales.float().repeat_interleave(16, dim=1)[:, :features]
    for dtype in (torch.float32, torch.float16):
        eye = torch.eye(features, dtype=dtype, device=device)
        assert torch.equal(linear(eye, weight).T.cpu().float(), exact)


def test_negative_scales_stay_as_they_are(device: str) -> None:
    values = torch.zeros(4 * 32 // 2, dtype=torch.uint8, device=device)
    scales = torch.tensor([[-1.0, 2.0]] * 4, device=device).to(torch.float8_e4m3fn)
    weight = from_canonical(values, scales, shape=(4, 32), bits=4, number="e2m1", group_size=16)
    assert weight.scale_format == "e4m3"

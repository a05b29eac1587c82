"""The range search for keys and values against brute force over the samples themselves, in float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inferencex.convert.quantize.kv_cache import BINS, count_magnitudes, search_scales
from inferencex.formats.dialect.reference import keep_in_8_bits as kept_in_numpy
from inferencex.formats.kv_cache import KV_FORMATS, KV_LARGEST, KVFormat
from inferencex.runtime.backends.reference.attention import keep_in_8_bits

KINDS: list[KVFormat] = ["int8", "fp8"]


def _round(x: NDArray[np.float64], kind: KVFormat) -> NDArray[np.float64]:
    if kind == "int8":
        return np.rint(x)
    numbers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    numbers = np.sort(numbers[np.isfinite(numbers)])
    return numbers[np.abs(x[:, None] - numbers[None, :]).argmin(1)]


def _error(x: NDArray[np.float64], scale: float, kind: KVFormat) -> float:
    most = KV_LARGEST[kind]
    return float(np.square(scale * _round(np.clip(x / scale, -most, most), kind) - x).sum())


def _heads(seed: int) -> torch.Tensor:
    """Heads of different kinds: normal, with rare large numbers, with a large channel, uniform; `[T, 4, D]`."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((300, 4, 16))
    x[:, 1] *= np.where(rng.random((300, 16)) < 0.002, 30, 1)
    x[:, 2, 5] *= 12
    x[:, 3] = rng.uniform(-3, 3, (300, 16))
    return torch.from_numpy(x.astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_no_range_is_much_better(kind: KVFormat) -> None:
    x = _heads(0)
    largest = x.abs().amax((0, 2)).numpy()
    scales = search_scales(count_magnitudes(x, largest), largest, kind)
    for head in range(4):
        numbers = x[:, head].double().numpy().reshape(-1)
        chosen = _error(numbers, float(scales[head]), kind)
        ranges = np.linspace(0.125, 1.0, 150) * float(largest[head]) / KV_LARGEST[kind]
        best = min(_error(numbers, float(scale), kind) for scale in ranges)
        assert chosen <= 1.08 * best, "with so few samples the error is no smooth function of the range"
    if kind == "int8":
        assert scales[3] * 127 > 0.97 * largest[3]


def test_a_number_in_a_million_is_cut_off() -> None:
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((62500, 1, 16), dtype=np.float32))
    x[77, 0, 3] = 15.0
    largest = np.array([15.0], np.float32)
    (scale,) = search_scales(count_magnitudes(x, largest), largest, "int8").tolist()
    assert 4 < 127 * scale < 7
    errors = [float((x - keep_in_8_bits(x, [s], "int8")).square().sum()) for s in (scale, 15 / 127)]
    assert errors[0] < 0.3 * errors[1]


def test_counting_is_exact_and_additive() -> None:
    x = _heads(1)
    largest = x.abs().amax((0, 2)).numpy()
    counts = count_magnitudes(x, largest)
    assert counts.shape == (4, BINS) and counts.sum() == x.numel() and counts[:, -1].min() >= 1
    parts = sum(count_magnitudes(part, largest) for part in x.split(70))
    np.testing.assert_array_equal(counts, parts)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_zeros_get_a_scale(kind: KVFormat) -> None:
    x = torch.zeros(5, 2, 3)
    x[0, 1, 0] = 1e-42
    largest = x.abs().amax((0, 2)).numpy()
    scales = search_scales(count_magnitudes(x, largest), largest, kind)
    np.testing.assert_array_equal(scales, [1.0, 1.0])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KINDS), st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40), st.data())
def test_torch_and_numpy_keep_the_same(kind: KVFormat, numbers: list[float], data: st.DataObject) -> None:
    scale = data.draw(st.sampled_from([2.0**-6, 0.37, 1.0, 93.1, 1e-3]))
    x = np.array(numbers, np.float32)[:, None, None]
    kept = keep_in_8_bits(torch.from_numpy(x), [scale], kind).numpy()
    np.testing.assert_array_equal(kept, kept_in_numpy(x, [scale], KV_FORMATS[kind]))
    s = float(np.float32(scale))
    scaled = np.clip(x.reshape(-1).astype(np.float64) / s, -KV_LARGEST[kind], KV_LARGEST[kind])
    step = np.maximum(np.abs(scaled) / 16, 2.0**-10) if kind == "fp8" else 0.5
    assert (np.abs(kept.reshape(-1) / s - scaled) <= step * (1 + 1e-5)).all()

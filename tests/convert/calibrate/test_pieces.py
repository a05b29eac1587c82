"""The small parts of calibration: stored activations, Gram matrices, stacked experts, divided rows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from inferencex.convert.calibrate.activations import ActivationStore
from inferencex.convert.calibrate.factors import scaled, with_divided_rows
from inferencex.convert.calibrate.gram import gram_matrix
from inferencex.convert.calibrate.stacking import stack
from inferencex.convert.calibrate.statistics import input_statistics
from inferencex.convert.quantize import Calibration, TensorScheme, quantize_weight
from inferencex.formats.errors import QuantizationError


def test_activations_beyond_the_limit_go_to_disk_and_come_back(tmp_path: Path) -> None:
    store = ActivationStore(tmp_path, limit=1000)
    small, large = torch.randn(10, 4), torch.randn(100, 7).to(torch.bfloat16)
    empty, scalar_like = torch.empty(0, 5), torch.arange(300)
    for key, tensor in {"small": small, "large": large, "empty": empty, "long": scalar_like}.items():
        store.put(key, tensor)
    assert store.spilled_bytes == large.numel() * 2 + 300 * 8
    for key, tensor in {"small": small, "large": large, "empty": empty, "long": scalar_like}.items():
        found = store.get(key)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
    for key in ("small", "large", "empty", "long"):
        store.drop(key)
    assert list(tmp_path.iterdir()) == []
    store.put("again", torch.randn(200))  # what was dropped has made room
    assert list(tmp_path.iterdir()) == []


def test_a_key_is_taken_once(tmp_path: Path) -> None:
    store = ActivationStore(tmp_path, limit=1000)
    store.put("x", torch.zeros(3))
    with pytest.raises(KeyError):
        store.put("x", torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [1, 5, 64, 257, 600])
def test_gram_matrices_are_exact_symmetric_and_independent_of_threads(channels: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(channels)
    batches = [torch.randn(rows, channels, generator=generator).to(dtype) for rows in (33, 0, 1, 70)]
    rows = torch.cat(batches).double()
    expected = rows.T @ rows / len(rows)
    grams = []
    for threads in (1, 3):
        with ThreadPoolExecutor(threads) as pool:
            loads = [lambda batch=batch: batch for batch in batches]
            grams.append(gram_matrix(loads, channels, pool, threads))
    assert torch.equal(grams[0], grams[1])
    assert torch.equal(grams[0], grams[0].T)
    torch.testing.assert_close(grams[0].double(), expected, rtol=1e-5, atol=1e-5)
    assert bool((torch.linalg.eigvalsh(grams[0].double()) > -1e-5 * grams[0].diagonal().max()).all())


def test_statistics_count_measure_and_refuse() -> None:
    batches = [torch.tensor([[1.0, -2.0], [3.0, 0.5]]), torch.tensor([[0.0, 4.0]])]
    with ThreadPoolExecutor(2) as pool:
        found = input_statistics("x", [lambda b=b: b for b in batches], 2, pool, 2, with_gram=True)
        assert found.tokens == 3
        np.testing.assert_allclose(found.mean_square, [10 / 3, 20.25 / 3], rtol=1e-6)
        assert found.absolute_max is not None and found.gram is not None
        np.testing.assert_array_equal(found.absolute_max, [3.0, 4.0])
        np.testing.assert_allclose(np.diag(found.gram), found.mean_square, rtol=1e-6)
        batches.append(torch.tensor([[float("nan"), 1.0]]))
        with pytest.raises(QuantizationError, match=r"activations layer\.3\.input are not finite .* channel 0"):
            input_statistics("layer.3.input", [lambda b=b: b for b in batches], 2, pool, 2, with_gram=False)


def test_float16_never_overflows_in_statistics() -> None:
    rows = torch.full((4, 3), 6e4)
    with ThreadPoolExecutor(1) as pool:
        found = input_statistics("x", [lambda: rows], 3, pool, 1, with_gram=True)
    assert np.isfinite(found.mean_square).all()
    assert found.gram is not None and np.isfinite(found.gram).all()


@pytest.mark.parametrize("kind", ["int3", "int4", "int8"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shape", [(3, 5), (4, 16), (1, 7)])
def test_stacked_experts_are_what_each_was(kind: str, symmetric: bool, shape: tuple[int, int]) -> None:
    if kind == "int8":
        symmetric = True
    random = np.random.default_rng(0)
    scheme = TensorScheme(kind, 4, symmetric)
    parts = [
        quantize_weight("w", random.normal(size=shape).astype(np.float32) * scale, scheme).tensor
        for scale in (1.0, 1e-7, 3.0)
    ]
    whole = stack(parts)
    assert whole.shape == (3, *shape)
    np.testing.assert_allclose(whole.dequantize(), np.stack([part.dequantize() for part in parts]), rtol=1e-6)


def test_rows_are_divided_through_their_scales() -> None:
    weight = np.random.default_rng(1).normal(size=(6, 32)).astype(np.float32)
    tensor = quantize_weight("w", weight, TensorScheme("int4", 8, False)).tensor
    divisors = np.array([1, 2, 0.5, 3, 1e-3, 1e6], dtype=np.float32)
    divided = with_divided_rows(tensor, divisors)
    expected = tensor.dequantize() / divisors[:, None]
    np.testing.assert_allclose(divided.dequantize(), expected, rtol=2e-3)
    assert divided.scales.dtype == np.float32  # 1e-6 of a scale is below float16's normal range


def test_scaled_statistics_are_those_of_the_divided_input() -> None:
    rows = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    factors = np.array([1.0, 2.0, 0.25, 7.0], dtype=np.float32)
    with ThreadPoolExecutor(1) as pool:
        before = input_statistics("x", [lambda: rows], 4, pool, 1, with_gram=True)
        after = input_statistics("x", [lambda: rows / torch.from_numpy(factors)], 4, pool, 1, with_gram=True)
    found = scaled(before, factors)
    assert isinstance(found, Calibration)
    np.testing.assert_allclose(found.mean_square, after.mean_square, rtol=1e-5)
    assert found.gram is not None and after.gram is not None
    np.testing.assert_allclose(found.gram, after.gram, rtol=1e-4, atol=1e-6)
    assert found.absolute_max is not None and after.absolute_max is not None
    np.testing.assert_allclose(found.absolute_max, after.absolute_max, rtol=1e-6)

"""Learnable weights: what they are is what is stored, at the start and after any step."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inferencex.convert.quantize import TensorScheme, quantize_weight
from inferencex.convert.quantize.refine import LearnableWeight, Rates
from inferencex.formats.errors import QuantizationError
from inferencex.formats.packing import PER_CHANNEL, QuantizedTensor


def _tensor(shape: tuple[int, ...], scheme: TensorScheme, seed: int = 0) -> tuple[torch.Tensor, QuantizedTensor]:
    source = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return source, quantize_weight("w", source.numpy(), scheme, threads=1).tensor


def _same(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    zeros = a.zero_points is None or b.zero_points is None or np.array_equal(a.zero_points, b.zero_points)
    return np.array_equal(a.values, b.values) and np.array_equal(a.scales, b.scales) and zeros


_TYPES = ["int3", "int4", "int5", "int6", "int8"]
_SCHEMES = st.builds(TensorScheme, st.sampled_from(_TYPES), st.sampled_from([8, 16, 24, 100]), st.booleans())


@given(_SCHEMES, st.sampled_from([(5, 48), (3, 40), (2, 3, 40), (7, 9)]), st.booleans(), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_what_it_is_is_what_is_stored(
    scheme: TensorScheme, shape: tuple[int, ...], with_source: bool, seed: int
) -> None:
    source, tensor = _tensor(shape, scheme, seed)
    weight = LearnableWeight("w", tensor, source if with_source else None)
    assert _same(weight.quantized(), tensor)
    for step in range(4):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(seed + step))
        weight.step(gradient, Rates(rounding=0.4, scales=0.2, zeros=0.7), 1.0)
        stored = weight.quantized()
        assert np.array_equal(weight.dequantized().numpy(), stored.dequantize())
        assert (stored.bits, stored.group_size, stored.symmetric) == (tensor.bits, tensor.group_size, tensor.symmetric)
        assert stored.shape == tensor.shape
        assert stored.scales.dtype == tensor.scales.dtype
        assert (stored.scales > 0).all()
    assert not _same(stored, tensor)


def test_scales_per_channel() -> None:
    source, tensor = _tensor((6, 20), TensorScheme("int8", PER_CHANNEL, symmetric=True))
    weight = LearnableWeight("w", tensor, source)
    weight.step(torch.ones(6, 20), Rates(0.5, 0.1, 0.0), 1.0)
    assert weight.quantized().scales.shape == (6,)
    assert np.array_equal(weight.dequantized().numpy(), weight.quantized().dequantize())


def test_a_constant_gradient_moves_a_weight_by_one_integer_in_one_over_the_rate_steps() -> None:
    _, tensor = _tensor((4, 32), TensorScheme("int8", 16, symmetric=True))
    weight = LearnableWeight("w", tensor)
    for _ in range(5):
        weight.step(torch.full((4, 32), 3e-7), Rates(rounding=0.2, scales=0.0, zeros=0.0), 1.0)
    moved = tensor.integers().astype(int) - weight.quantized().integers()
    free = tensor.integers() > -127
    assert (moved[free] == 1).all()


def test_steps_lower_a_quadratic_loss() -> None:
    source, tensor = _tensor((16, 64), TensorScheme("int4", 32, symmetric=False))
    inputs = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    inputs += 2.0 * inputs[:, :1]
    weight = LearnableWeight("w", tensor, source)

    def error() -> torch.Tensor:
        return (weight.dequantized() - source) @ inputs.T

    before = float(error().square().sum())
    for step in range(100):
        weight.step(error() @ inputs, Rates(2e-2, 1e-3, 2e-2), 1.0 - step / 100)
    assert float(error().square().sum()) < 0.6 * before


def test_only_clipped_weights_move_a_zero_point() -> None:
    values = np.zeros(8, dtype=np.uint8)  # all integers 0, the lowest
    tensor = QuantizedTensor(values, np.ones((1, 1), np.float16), np.array([5], np.uint8), 4, 16, False, (1, 16))
    rates = Rates(rounding=0.0, scales=0.0, zeros=1.0)
    inside = LearnableWeight("w", tensor)
    inside.step(torch.ones(1, 16), rates, 1.0)
    assert inside.quantized().zero_points == np.array([5], np.uint8)
    clipped = LearnableWeight("w", tensor)
    clipped.step(torch.ones(1, 16), Rates(rounding=2.0, scales=0.0, zeros=0.0), 1.0)  # positions now below the range
    clipped.step(torch.ones(1, 16), rates, 1.0)
    assert clipped.quantized().zero_points == np.array([6], np.uint8)
    assert (clipped.dequantized() == -6.0).all()


def test_state_goes_on_where_it_ended() -> None:
    source, tensor = _tensor((5, 40), TensorScheme("int4", 16, symmetric=False))
    gradients = [torch.randn(5, 40, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    one, two = LearnableWeight("w", tensor, source), LearnableWeight("w", tensor, source)
    for gradient in gradients:
        one.step(gradient, Rates(0.3, 0.1, 0.3), 1.0)
    first = LearnableWeight("w", tensor, source)
    for gradient in gradients[:3]:
        first.step(gradient, Rates(0.3, 0.1, 0.3), 1.0)
    two.load_state(first.state())
    for gradient in gradients[3:]:
        two.step(gradient, Rates(0.3, 0.1, 0.3), 1.0)
    assert _same(one.quantized(), two.quantized())


def test_a_source_of_another_shape_is_refused() -> None:
    source, tensor = _tensor((4, 32), TensorScheme("int4", 16, symmetric=False))
    with pytest.raises(QuantizationError, match=r"layer\.w: the source's shape \[32, 4\]"):
        LearnableWeight("layer.w", tensor, source.T)


def test_floats_are_refused() -> None:
    tensor = QuantizedTensor(
        np.zeros((2, 16), ml_dtypes.float8_e4m3fn), np.ones(2, np.float32), None, 8, PER_CHANNEL, True, (2, 16), "e4m3"
    )
    with pytest.raises(QuantizationError, match=r"layer\.w: holds e4m3 numbers"):
        LearnableWeight("layer.w", tensor)

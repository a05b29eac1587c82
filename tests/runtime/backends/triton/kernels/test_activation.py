from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inferencex.runtime.backends.reference import fused
from inferencex.runtime.backends.triton.kernels.activation import (
    ACTIVATIONS,
    GATED_ACTIVATIONS,
    LAYOUTS,
    activation,
    activation_quantized,
    gated_activation,
    gated_activation_quantized,
)
from inferencex.runtime.backends.triton.kernels.quantize_rows import Quantization, Quantized

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of the interpreter, as meant

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(5)) * 4).to(dtype)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    error = (found.cpu().double() - wanted).abs() / (1 + wanted.abs())
    assert error.max() < TOLERANCE[found.dtype]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", GATED_ACTIVATIONS)
def test_gates(device: str, name: str, layout: str) -> None:
    for features, dtype in ((1, torch.float32), (77, torch.float16), (2500, torch.float32), (300, torch.bfloat16)):
        x = random(3, 2 * features, dtype=dtype)
        for limit in (0.0, 7.0):
            found = gated_activation(x.to(device), name, layout, 1.702, limit)
            assert found.dtype == dtype
            assert_close(found, fused.gated_activation(x.double(), name, layout, 1.702, limit))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_without_a_gate(device: str, name: str) -> None:
    x = random(3, 777)
    assert_close(activation(x.to(device), name), fused.activate(x.double(), name))


@pytest.mark.parametrize("name", GATED_ACTIVATIONS)
def test_far_numbers_stay_finite(device: str, name: str) -> None:
    x = torch.tensor([[-100.0, 100.0, -3e4, 3e4, 1.0, 1.0, 1.0, 1.0]])
    assert_close(gated_activation(x.to(device), name), fused.gated_activation(x.double(), name))


@pytest.mark.parametrize("to", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("features", [40, 1000, 16400])
def test_fused_quantization_is_the_separate_one(device: str, features: int, fixed: bool, to: torch.dtype) -> None:
    x = random(2, 2 * features, dtype=torch.float16).to(device)
    quantization = Quantization(to, torch.tensor([0.04], device=device) if fixed else None)
    for gate in (("silu",), ("swiglu_clamped", "interleaved", 1.7, 7.0)):
        plain = gated_activation(x, *gate)
        wanted = quantization.of(plain)
        for keep in (False, True):
            quantized, kept = gated_activation_quantized(x, quantization, *gate, keep=keep)
            assert torch.equal(kept, plain) if keep else kept is None
            check_same(quantized, wanted)
    plain = activation(x[:, :features], "sigmoid")
    check_same(activation_quantized(x[:, :features], quantization, "sigmoid"), quantization.of(plain))


def check_same(found: Quantized, wanted: Quantized) -> None:
    assert torch.equal(found.scales, wanted.scales)
    assert torch.equal(found.values.view(torch.uint8), wanted.values.view(torch.uint8))


def test_rows_that_lie_apart_and_a_place_for_the_result(device: str) -> None:
    x = random(5, 100)
    out = torch.empty(5, 20, device=device)
    assert gated_activation(x.to(device)[:, 10:50], "silu", out=out) is out
    assert_close(out, fused.gated_activation(x[:, 10:50].double(), "silu"))
    assert gated_activation(torch.zeros(0, 8, device=device), "silu").shape == (0, 4)


def test_what_is_unknown_is_refused(device: str) -> None:
    x = torch.zeros(2, 6, device=device)
    with pytest.raises(ValueError, match="activation is 'tanh'"):
        gated_activation(x, "tanh")
    with pytest.raises(ValueError, match="activation is 'swiglu_clamped'"):
        activation(x, "swiglu_clamped")
    with pytest.raises(ValueError, match="layout is 'halves'"):
        gated_activation(x, "silu", "halves")
    with pytest.raises(ValueError, match="rows of 5 features"):
        gated_activation(x[:, :5], "silu")
    with pytest.raises(ValueError, match="expected contiguous"):
        gated_activation(x, "silu", out=torch.zeros(2, 4, device=device))

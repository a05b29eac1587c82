from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from inferencex.formats.packing import pack_bits
from inferencex.runtime.backends.reference import fused
from inferencex.runtime.backends.triton.kernels.experts import expert_linear, experts
from inferencex.runtime.backends.triton.weights import LinearWeight, from_canonical, plain

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of the interpreter, as meant


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Scheme:
    bits: int
    group: int
    has_zeros: bool = False


SCHEMES = [
    Scheme(16, 0),
    Scheme(4, 32),
    Scheme(4, 128, True),
    Scheme(4, 48, True),
    Scheme(4, 16),
    Scheme(4, 1 << 20, True),
    Scheme(8, 1 << 20),
    Scheme(8, 64),
    Scheme(8, 128, True),
]


def make_stack(
    shape: tuple[int, int, int], scheme: Scheme, device: str, dtype: torch.dtype, seed: int, *, has_bias: bool
) -> tuple[LinearWeight, Tensor, Tensor | None]:
    """Return a stack, the float64 weights it stands for, and its biases."""
    count, rows, features = shape
    bias = random(count, rows, seed=seed + 9) if has_bias else None
    on_device = None if bias is None else bias.to(device, dtype)
    exact_bias = None if on_device is None else on_device.cpu().double()
    if scheme.bits == 16:
        values = (random(*shape, seed=seed) / features**0.5).to(dtype)
        return plain(values.to(device), dtype, on_device), values.double(), exact_bias
    generator = np.random.default_rng(seed)
    half = 1 << (scheme.bits - 1)
    numbers = generator.integers(-half, half, shape).astype(np.int8)
    groups = -(-features // min(scheme.group, features))
    scales = torch.from_numpy(generator.uniform(0.5, 2, (count, rows, groups)) / half / features**0.5).half()
    zeros = generator.integers(-half, half, scales.shape).astype(np.int8) if scheme.has_zeros else None

    def stored(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array if scheme.bits == 8 else pack_bits(array, 4)).to(device)

    weight = from_canonical(
        stored(numbers),
        scales.to(device),
        None if zeros is None else stored(zeros),
        shape=shape,
        bits=scheme.bits,
        group_size=scheme.group,
        bias=on_device,
    )
    of_feature = torch.arange(features) // min(scheme.group, features)
    exact = torch.from_numpy(numbers).double()
    if zeros is not None:
        exact = exact - torch.from_numpy(zeros).double()[:, :, of_feature]
    return weight, exact * scales.double()[:, :, of_feature], exact_bias


def route_randomly(tokens: int, k: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    scores = random(tokens, count, seed=seed).softmax(-1)
    weights, index = scores.topk(k)
    return index, weights


def expected(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    gate: tuple[str, str, float, float],
) -> Tensor:
    """Return the layer of a few tokens in float64."""
    y = torch.zeros(x.shape[0], down.shape[1], dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for expert, weight in zip(index[token], weights[token].double(), strict=True):
            inner = gate_up[expert] @ row + (0 if gate_up_bias is None else gate_up_bias[expert])
            outer = down[expert] @ fused.gated_activation(inner[None], *gate)[0]
            y[token] += weight * (outer + (0 if down_bias is None else down_bias[expert]))
    return y


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("tokens", [1, 9])
def test_gated_experts_of_every_format(device: str, scheme: Scheme, tokens: int) -> None:
    count, k, width, inner = 4, 2, 96, 80
    gate_up, gate_up_exact, gate_up_bias = make_stack(
        (count, 2 * inner, width), scheme, device, torch.float32, 1, has_bias=True
    )
    down, down_exact, down_bias = make_stack((count, width, inner), scheme, device, torch.float32, 2, has_bias=True)
    x = random(tokens, width, seed=3)
    index, weights = route_randomly(tokens, k, count, 4)
    found = experts(x.to(device), index.to(device), weights.to(device), gate_up, down, "silu")
    gate = ("silu", "concat", 1.0, 0.0)
    wanted = expected(x, index, weights, gate_up_exact, down_exact, gate_up_bias, down_bias, gate)
    assert (found.cpu().double() - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("tokens", [40, 110])
def test_many_tokens_an_expert_and_ragged_sizes(device: str, tokens: int) -> None:
    """Larger tiles; neither panels nor blocks divide the sizes; no biases; interleaved gates."""
    count, k, width, inner = 3, 2, 72, 19
    x = random(tokens, width, seed=3)
    index, weights = route_randomly(tokens, k, count, 4)
    for scheme in (SCHEMES[0], SCHEMES[2]):
        gate_up, gate_up_exact, _ = make_stack(
            (count, 2 * inner, width), scheme, device, torch.float32, 1, has_bias=False
        )
        down, down_exact, _ = make_stack((count, width, inner), scheme, device, torch.float32, 2, has_bias=False)
        gate = ("swiglu_clamped", "interleaved", 1.702, 7.0)
        found = experts(x.to(device), index.to(device, torch.int32), weights.to(device), gate_up, down, *gate)
        wanted = expected(x, index, weights, gate_up_exact, down_exact, None, None, gate)
        assert (found.cpu().double() - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_half_precision(device: str) -> None:
    count, k, width, inner = 4, 2, 96, 64
    x = random(5, width, seed=3).half()
    index, weights = route_randomly(5, k, count, 4)
    for scheme in (SCHEMES[0], SCHEMES[1]):
        gate_up, gate_up_exact, bias = make_stack(
            (count, 2 * inner, width), scheme, device, torch.float16, 1, has_bias=True
        )
        down, down_exact, _ = make_stack((count, width, inner), scheme, device, torch.float16, 2, has_bias=False)
        found = experts(x.to(device), index.to(device), weights.half().to(device), gate_up, down, "gelu_tanh")
        gate = ("gelu_tanh", "concat", 1.0, 0.0)
        wanted = expected(x, index, weights.half(), gate_up_exact, down_exact, bias, None, gate)
        assert found.dtype == torch.float16
        assert (found.cpu().double() - wanted).abs().max() < 3e-3 * wanted.abs().max()


def test_a_token_does_not_depend_on_its_neighbours(device: str) -> None:
    count, width, inner = 5, 64, 48
    gate_up, _, _ = make_stack((count, 2 * inner, width), SCHEMES[1], device, torch.float32, 1, has_bias=True)
    down, _, _ = make_stack((count, width, inner), SCHEMES[1], device, torch.float32, 2, has_bias=True)
    x = random(12, width, seed=3).to(device)
    index, weights = (part.to(device) for part in route_randomly(12, 2, count, 4))
    whole = experts(x, index, weights, gate_up, down, "silu")
    for token in (0, 5, 11):
        alone = experts(*(part[token : token + 1] for part in (x, index, weights)), gate_up, down, "silu")
        assert torch.equal(alone[0], whole[token])


def test_experts_that_do_not_exist_add_nothing(device: str) -> None:
    """As rows that pad a step have."""
    gate_up, _, _ = make_stack((3, 64, 32), SCHEMES[0], device, torch.float32, 1, has_bias=True)
    down, _, _ = make_stack((3, 32, 32), SCHEMES[0], device, torch.float32, 2, has_bias=True)
    x = random(3, 32, seed=3).to(device)
    index = torch.tensor([[0, 2], [-1, 3], [1, -1]], device=device)
    weights = torch.tensor([[0.5, 0.5], [0.3, 0.7], [1.0, float("nan")]], device=device)
    found = experts(x, index, weights, gate_up, down, "silu")
    assert (found[1] == 0).all()
    once = experts(x[2:], index[2:, :1], weights[2:, :1], gate_up, down, "silu")
    assert torch.equal(found[2], once[0])
    assert experts(x[:0], index[:0], weights[:0], gate_up, down, "silu").shape == (0, 32)


@pytest.mark.parametrize("scheme", [SCHEMES[0], SCHEMES[3], SCHEMES[6]], ids=str)
def test_a_linear_layer_by_row(device: str, scheme: Scheme) -> None:
    weight, exact, bias = make_stack((5, 50, 100), scheme, device, torch.float32, 1, has_bias=True)
    x = random(70, 100, seed=3)
    ids = torch.from_numpy(np.random.default_rng(4).integers(0, 5, 70))
    found = expert_linear(x.to(device), ids.to(device), weight).cpu().double()
    wanted = torch.einsum("mk,mnk->mn", x.double(), exact[ids]) + bias[ids]
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert expert_linear(x[:0].to(device), ids[:0].to(device), weight).shape == (0, 50)


def test_what_does_not_belong_together_is_refused(device: str) -> None:
    gate_up, _, _ = make_stack((3, 64, 32), SCHEMES[0], device, torch.float32, 1, has_bias=False)
    down, _, _ = make_stack((3, 32, 30), SCHEMES[0], device, torch.float32, 2, has_bias=False)
    x, index = torch.zeros(2, 32, device=device), torch.zeros(2, 2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"expected \[E, 2F, S\]"):
        experts(x, index, torch.ones(2, 2, device=device), gate_up, down, "silu")
    with pytest.raises(ValueError, match=r"expected \[T, S\]"):
        experts(x[:1], index, torch.ones(2, 2, device=device), gate_up, down, "silu")
    with pytest.raises(ValueError, match=r"weights of torch\.float32 for rows of torch\.float16"):
        expert_linear(x.half(), index[:, 0], gate_up)

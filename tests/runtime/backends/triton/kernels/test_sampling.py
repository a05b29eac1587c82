"""Choices on the device against the sampler's definition: the same tokens from the same numbers, but at borders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from inferencex.runtime.backends.triton.kernels.sampling import sample
from inferencex.runtime.engine.sampler import SequenceSampler
from inferencex.runtime.params import SamplingParams

_BORDER = 1e-10
"""Of the total mass: how near to a border a uniform number lies that may give the token beyond it."""


@dataclass(frozen=True)
class Request:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def defined(self, logits: np.ndarray, uniform: float, *, top_p: float | None = None) -> int:
        fields: dict[str, Any] = {"temperature": self.temperature, "top_k": self.top_k, "min_p": self.min_p}
        params = SamplingParams(**fields, top_p=self.top_p if top_p is None else top_p)
        return SequenceSampler(params, 0, (), ()).choose(logits, uniform)

    def allowed(self, logits: np.ndarray, uniform: float) -> set[int]:
        """Return what the definition gives for this uniform and for those just beside it, and likewise for top-p."""
        beside = [uniform, max(uniform - _BORDER, 0), min(uniform + _BORDER, 1 - 2**-53)]
        tokens = {self.defined(logits, number) for number in beside}
        if self.top_p < 1:
            for top_p in (self.top_p * (1 - _BORDER), min(self.top_p * (1 + _BORDER), 1.0)):
                tokens |= {self.defined(logits, number, top_p=top_p) for number in beside}
        return tokens


REQUESTS = [
    Request(),
    Request(temperature=0.0),
    Request(temperature=0.3),
    Request(temperature=50.0),
    Request(temperature=1e6),
    Request(temperature=2e-5),
    Request(top_k=1),
    Request(top_k=2, temperature=3.0),
    Request(top_k=40),
    Request(top_k=300),
    Request(top_k=10**6),
    Request(top_k=-1),
    Request(top_p=0.95),
    Request(top_p=0.5, temperature=2.0),
    Request(top_p=1e-9),
    Request(top_p=0.999999),
    Request(min_p=0.1),
    Request(min_p=1e-6, temperature=5.0),
    Request(min_p=1.0),
    Request(top_k=50, top_p=0.9),
    Request(top_k=50, top_p=0.9, min_p=0.05, temperature=0.7),
    Request(top_p=0.9, min_p=0.05),
    Request(top_k=20, min_p=0.2),
    Request(top_k=7, temperature=1e6),
]


def choose(device: str, logits: np.ndarray, requests: list[Request], uniforms: np.ndarray) -> list[int]:
    def column(name: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.tensor([getattr(request, name) for request in requests], dtype=dtype, device=device)

    tokens = sample(
        torch.from_numpy(logits).to(device),
        column("temperature"),
        column("top_k", torch.int32),
        column("top_p"),
        column("min_p"),
        torch.from_numpy(uniforms).to(device),
    )
    assert tokens.dtype == torch.int32
    return tokens.tolist()


def random_logits(random: np.random.Generator, rows: int, size: int, kind: str) -> np.ndarray:
    normal = 3 * random.standard_normal((rows, size))
    match kind:
        case "ties":
            normal = np.round(normal)
        case "flat":
            normal[:] = 1.5
        case "peaked":
            normal[np.arange(rows), random.integers(0, size, rows)] += 30
        case "extreme":
            normal *= 10.0 ** random.integers(-30, 30, normal.shape)
        case "zeros":
            normal = np.where(random.random(normal.shape) < 0.5, 0.0, -0.0)
    return normal.astype(np.float32)


@pytest.mark.parametrize("kind", ["normal", "ties", "flat", "peaked", "extreme", "zeros"])
@pytest.mark.parametrize("size", [1, 17, 300, 5000])
def test_choices_are_those_of_the_definition(device: str, size: int, kind: str) -> None:
    random = np.random.default_rng(size)
    requests = REQUESTS
    logits = random_logits(random, len(requests), size, kind)
    uniforms = random.random(len(requests))
    uniforms[::5] = random.choice([0.0, 1 - 2**-53, 0.5], len(uniforms[::5]))
    tokens = choose(device, logits, requests, uniforms)
    differing = 0
    for request, row, uniform, token in zip(requests, logits, uniforms, tokens, strict=True):
        assert token in request.allowed(row, uniform), (request, uniform)
        differing += token != request.defined(row, uniform)
    if kind in ("normal", "peaked"):
        assert differing == 0  # a border is too rare a place


def test_sums_run_in_the_order_of_the_definition(device: str) -> None:
    """By token id without a sort, else from the heaviest down, ties by token id."""
    logits = np.log(np.array([[1, 4, 2, 1, 2]], dtype=np.float32))
    for request, order in (
        (Request(), [0, 1, 1, 1, 1, 2, 2, 3, 4, 4]),
        (Request(top_k=4), [1, 1, 1, 1, 2, 2, 4, 4, 0]),
        (Request(top_p=0.7999), [1, 1, 1, 1, 2, 2, 4, 4]),
        (Request(top_p=0.85), [1, 1, 1, 1, 2, 2, 4, 4, 0]),
        (Request(min_p=0.4), [1, 1, 1, 1, 2, 2, 4, 4]),
    ):
        numbers = (np.arange(len(order)) + 0.5) / len(order)
        tokens = choose(device, np.repeat(logits, len(order), 0), [request] * len(order), numbers)
        assert tokens == order, request


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_half_precision(device: str, dtype: torch.dtype) -> None:
    random = np.random.default_rng(3)
    logits = torch.from_numpy(random_logits(random, len(REQUESTS), 700, "normal")).to(dtype)
    uniforms = random.random(len(REQUESTS))
    columns = [
        torch.tensor([getattr(r, name) for r in REQUESTS], dtype=torch.int32 if name == "top_k" else torch.float64)
        for name in ("temperature", "top_k", "top_p", "min_p")
    ]
    tokens = sample(
        logits.to(device), *(column.to(device) for column in columns), torch.from_numpy(uniforms).to(device)
    )
    for request, row, uniform, token in zip(REQUESTS, logits.float().numpy(), uniforms, tokens.tolist(), strict=True):
        assert token in request.allowed(row, uniform)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [1, 300, 5000])
def test_a_row_that_is_not_finite_is_told_apart(device: str, size: int, bad: float) -> None:
    logits = random_logits(np.random.default_rng(1), 4, size, "normal")
    logits[1, size // 2] = logits[3, size - 1] = bad
    requests = [Request(), Request(), Request(temperature=0.0), Request(temperature=0.0)]
    tokens = choose(device, logits, requests, np.full(4, 0.3))
    assert tokens == [requests[0].defined(logits[0], 0.3), -1, int(logits[2].argmax()), -1]


def test_more_rows_than_candidates_have_room(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferencex.runtime.backends.triton.kernels.sampling._WORKSPACE", 3 * 12 * 50)
    logits = random_logits(np.random.default_rng(1), 8, 50, "normal")
    uniforms = np.random.default_rng(2).random(8)
    tokens = choose(device, logits, [Request(top_p=0.9)] * 8, uniforms)
    assert tokens == [Request(top_p=0.9).defined(row, uniform) for row, uniform in zip(logits, uniforms, strict=True)]


def test_what_does_not_fit_is_refused(device: str) -> None:
    numbers = torch.ones(2, dtype=torch.float64, device=device)
    k = torch.zeros(2, dtype=torch.int32, device=device)
    logits = torch.zeros(2, 9, device=device)
    assert sample(logits[:0], numbers[:0], k[:0], numbers[:0], numbers[:0], numbers[:0]).shape == (0,)
    with pytest.raises(ValueError, match=r"temperature is torch\.float32"):
        sample(logits, numbers.float(), k, numbers, numbers, numbers)
    with pytest.raises(ValueError, match=r"uniform is torch\.float64 \[1\]"):
        sample(logits, numbers, k, numbers, numbers, numbers[:1])
    with pytest.raises(ValueError, match="expected contiguous floats"):
        sample(logits[:, ::2], numbers, k, numbers, numbers, numbers)

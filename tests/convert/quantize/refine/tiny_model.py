"""A small network with linears, a norm and a head, as a `Model` and as a block, and what refinement starts from."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from inferencex.convert.calibrate.arithmetic import multiply, one_thread_each
from inferencex.convert.quantize import TensorScheme, quantize_weight
from inferencex.convert.quantize.refine import Refinable, Windows

VOCAB, WIDTH, INNER, LENGTH = 61, 40, 72, 16


class TinyModel:
    """Two gated layers on a running mean of what came before, so that tokens depend on each other."""

    def __init__(self, seed: int = 0, scheme: TensorScheme | None = None) -> None:
        self.scheme = scheme or TensorScheme("int4", 16, symmetric=False)
        generator = torch.Generator().manual_seed(seed)

        def matrix(rows: int, columns: int) -> Tensor:
            normal = torch.randn(rows, columns, generator=generator)
            return normal / math.sqrt(columns)

        self.embedding, self.head = matrix(VOCAB, WIDTH) * math.sqrt(WIDTH), 3.0 * matrix(VOCAB, WIDTH)
        self.sources = {
            name: matrix(*shape)
            for layer in "01"
            for name, shape in ((f"{layer}.up", (INNER, WIDTH)), (f"{layer}.down", (WIDTH, INNER)))
        }
        self.plain = {f"{layer}.norm": 1.0 + 0.1 * torch.randn(WIDTH, generator=generator) for layer in "01"}

    def layer(self, x: Tensor, layer: str, weights: Mapping[str, Tensor]) -> Tensor:
        """Return what a layer makes of `x [S, L, WIDTH]`."""
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        normed = torch.nn.functional.rms_norm(past + x, (WIDTH,), weights[f"{layer}.norm"])
        inner = torch.nn.functional.silu(multiply(normed, weights[f"{layer}.up"]))
        return x + multiply(inner, weights[f"{layer}.down"])

    def hidden(self, weights: Mapping[str, Tensor], token_ids: Tensor) -> Tensor:
        """Return what the head reads."""
        x = self.embedding[token_ids]
        for layer in "01":
            x = self.layer(x, layer, weights)
        return x.reshape(-1, WIDTH)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits."""
        return hidden @ self.head.T

    def refinable(self) -> Refinable:
        """Quantize the linears to the nearest."""
        quantized = {
            name: quantize_weight(name, weight.numpy(), self.scheme, threads=1).tensor
            for name, weight in self.sources.items()
        }
        return Refinable(quantized, self.sources, self.plain)

    def windows(self, count: int, seed: int) -> Windows:
        """Return random token ids, and what the source makes of them."""
        token_ids = torch.randint(VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
        with one_thread_each(), torch.no_grad():
            hidden = self.hidden({**self.sources, **self.plain}, token_ids)
        return Windows(token_ids, hidden.reshape(count, LENGTH, WIDTH))

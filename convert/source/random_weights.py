"""Made-up weights for a configuration alone: a model of any shape to measure, the same for the same seed.

Every value depends only on the seed, the tensor's name and its position, so a tensor can be made in any pieces and
any order, on any machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
import torch
from transformers import PreTrainedModel

from inferencex.convert.source.base import TensorHandle
from inferencex.convert.source.parameter import ParameterSource, direct, has_values

# Values are made in blocks of this many, each from a stream of its own.
_BLOCK = 1 << 20
_DEFAULT_STD = 0.02
_NORM_MARKS = ("norm", "ln_", ".ln", "layernorm")


@dataclass(frozen=True)
class RandomHandle:
    """A tensor that is made when it is asked for; `fill` is "normal", "ones" or "zeros"."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int
    std: float
    fill: str

    @property
    def stored(self) -> str:
        """It is stored nowhere."""
        return "random"

    @property
    def nbytes(self) -> int:
        """It takes no bytes of any file."""
        return 0

    def load(self) -> torch.Tensor:
        """Make the whole tensor."""
        return self._span(0, prod(self.shape)).reshape(self.shape)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Make rows `start:stop` of the first axis, equal to those of `load`."""
        start, stop, _ = slice(start, stop).indices(self.shape[0])
        row = prod(self.shape[1:])
        stop = max(start, stop)
        return self._span(start * row, stop * row).reshape(stop - start, *self.shape[1:])

    def _span(self, start: int, stop: int) -> torch.Tensor:
        if self.fill != "normal":
            return torch.full((stop - start,), 1.0 if self.fill == "ones" else 0.0, dtype=self.dtype)
        out = torch.empty(stop - start, dtype=self.dtype)
        table = _quantiles(self.std, self.dtype)
        position = start
        while position < stop:
            block, offset = divmod(position, _BLOCK)
            count = min(stop - position, _BLOCK - offset)
            indices = torch.from_numpy(self._bits(block)[offset : offset + count])
            torch.index_select(table, 0, indices.to(torch.int32), out=out[position - start : position - start + count])
            position += count
        return out

    def _bits(self, block: int) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
        key = hashlib.sha256(f"{self.seed}/{self.name}/{block}".encode()).digest()
        # The raw stream of SFC64 is fixed by numpy's compatibility policy; its distributions are not.
        stream = np.random.SFC64(np.frombuffer(key, "<u4"))
        return stream.random_raw(_BLOCK // 4).astype("<u8", copy=False).view("<u2").astype(np.uint16, copy=False)


@lru_cache(maxsize=8)
def _quantiles(std: float, dtype: torch.dtype) -> torch.Tensor:
    """The 65,536 equally likely values of a normal distribution: a table is far faster than exact sampling."""
    middle = (torch.arange(1 << 16, dtype=torch.float64) + 0.5) / (1 << 16)
    quantiles: torch.Tensor = torch.special.ndtri(middle) * std
    return quantiles.to(dtype)


def for_parameters(
    parameters: Mapping[str, tuple[tuple[int, ...], torch.dtype]], *, seed: int, std: float = _DEFAULT_STD
) -> dict[str, TensorHandle]:
    """Handles for parameters given as `{name: (shape, dtype)}`.

    Biases are zero, weights of norms one, everything else normal with standard deviation `std`.
    """
    return {
        name: RandomHandle(name, shape, dtype, seed, std, _fill(name, shape))
        for name, (shape, dtype) in parameters.items()
    }


def random_parameters(
    model: PreTrainedModel, *, seed: int, dtype: torch.dtype | None = None
) -> dict[str, ParameterSource]:
    """Made-up values for every parameter of `model`; persistent buffers that have real values keep them.

    `dtype` is that of floating-point parameters, such as the one a config names; None for the model's own.
    """
    std = getattr(model.config.get_text_config(), "initializer_range", _DEFAULT_STD)
    real = {name: buffer for name, buffer in model.named_buffers() if has_values(buffer)}
    shapes = {
        name: (tuple(value.shape), dtype if dtype is not None and value.is_floating_point() else value.dtype)
        for name, value in model.state_dict().items()
        if name not in real
    }
    handles = for_parameters(shapes, seed=seed, std=float(std))
    sources = {name: direct(name, handle) for name, handle in handles.items()}
    for name, buffer in real.items():
        if name in model.state_dict():
            sources[name] = ParameterSource(name, tuple(buffer.shape), buffer.dtype, (), buffer.clone)
    return sources


def _fill(name: str, shape: tuple[int, ...]) -> str:
    leaf = name.rsplit(".", 1)[-1]
    if leaf.endswith("bias") or leaf.endswith("_b"):
        return "zeros"
    if len(shape) <= 1 and any(mark in name.lower() for mark in _NORM_MARKS):
        return "ones"
    return "normal"

"""All that one refinement learns, together: quantized weights, and plain tensors that cost nothing at run time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inferencex.convert.quantize.refine.adam import Adam
from inferencex.convert.quantize.refine.rounding import LearnableWeight, Rates
from inferencex.formats.packing import QuantizedTensor


@dataclass(frozen=True)
class Refinable:
    """What may be changed.

    weights:  quantized weights by name
    sources:  float weights by the same names, which they stand for (factors folded in); may lack some
    plain:    tensors that stay plain, such as the scales of norms and biases: floating point, in the dtype they are
              stored in
    """

    weights: Mapping[str, QuantizedTensor]
    sources: Mapping[str, Tensor] = field(default_factory=dict)
    plain: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """What was learned, as it is stored; `weights` and `plain` have the names and formats of the `Refinable`."""

    weights: dict[str, QuantizedTensor]
    plain: dict[str, Tensor]


class _LearnablePlain:
    def __init__(self, tensor: Tensor) -> None:
        self._dtype = tensor.dtype
        self._value = tensor.detach().to(torch.float32).clone()
        self._unit = float(self._value.abs().mean())
        self._optimizer = Adam(self._value)

    def stored(self) -> Tensor:
        return self._value.to(self._dtype, copy=True)

    def step(self, gradient: Tensor, rate: float) -> None:
        self._optimizer.update(self._value, gradient, rate * self._unit)

    def state(self) -> dict[str, Tensor]:
        return {"value": self._value, **self._optimizer.state()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._value.copy_(state["value"])
        self._optimizer.load_state(state)


class Parameters:
    """Learnable tensors by name, and the tensors that the executor is given for them.

    dtype:  of the weights given to the executor: that in which matrices are multiplied
    """

    def __init__(self, refinable: Refinable, dtype: torch.dtype, pool: Executor) -> None:
        self._pool = pool
        self._weights = {
            name: LearnableWeight(name, tensor, refinable.sources.get(name))
            for name, tensor in refinable.weights.items()
        }
        self._plain = {name: _LearnablePlain(tensor) for name, tensor in refinable.plain.items()}
        self._given = {name: weight.dequantized().to(dtype) for name, weight in self._weights.items()}
        self._given |= {name: plain.stored().to(torch.float32) for name, plain in self._plain.items()}

    def leaves(self) -> dict[str, Tensor]:
        """Return the tensors for the executor, sharing values, which `step` changes, but not gradients."""
        return {name: tensor.detach().requires_grad_() for name, tensor in self._given.items()}

    def values(self) -> dict[str, Tensor]:
        """Return the tensors for the executor, without gradients."""
        return dict(self._given)

    @torch.no_grad()
    def step(self, gradients: Sequence[Mapping[str, Tensor]], rates: Rates, fraction: float) -> None:
        """Take one step against the sum of gradients, added in the order given."""

        def update(name: str) -> None:
            with torch.no_grad():
                total = gradients[0][name].to(torch.float32)
                for more in gradients[1:]:
                    total = total + more[name]
                if name in self._weights:
                    if rates.rounding or rates.scales or rates.zeros:
                        self._weights[name].step(total, rates, fraction)
                        self._given[name].copy_(self._weights[name].dequantized())
                elif rates.plain:
                    self._plain[name].step(total, rates.plain * fraction)
                    self._given[name].copy_(self._plain[name].stored())

        list(self._pool.map(update, self._given))

    def snapshot(self) -> Snapshot:
        """Return everything as it would be stored now."""
        names = list(self._weights)
        tensors = self._pool.map(lambda name: self._weights[name].quantized(), names)
        return Snapshot(
            dict(zip(names, tensors, strict=True)), {name: plain.stored() for name, plain in self._plain.items()}
        )

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return what `load_state` needs to go on from here, by name."""
        weights = {name: weight.state() for name, weight in self._weights.items()}
        return weights | {name: plain.state() for name, plain in self._plain.items()}

    def load_state(self, state: Mapping[str, dict[str, Tensor]]) -> None:
        """Go on from a state of parameters that began with the same tensors."""
        for name, weight in self._weights.items():
            weight.load_state(state[name])
            self._given[name].copy_(weight.dequantized())
        for name, plain in self._plain.items():
            plain.load_state(state[name])
            self._given[name].copy_(plain.stored())

"""The contract of quantization methods, and the registry that knows them by name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from inferencex.formats.packing import QuantizedTensor

if TYPE_CHECKING:
    from inferencex.convert.quantize.scheme import TensorScheme


@dataclass(frozen=True)
class Calibration:
    """What the inputs of one weight looked like over the calibration samples.

    mean_square:  float32 `[K]`, or `[E, K]` for experts: mean of the squared input, by input channel; finite, >= 0
    inputs:       float32 `[rows, K]`, or None where the method needs no more than the statistics
    """

    mean_square: NDArray[np.float32]
    inputs: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantized weight, and how far it is from the one it replaces.

    squared_error:  sum over the weight of (weight - dequantized)^2
    squared_norm:   sum over the weight of weight^2
    """

    tensor: QuantizedTensor
    squared_error: float
    squared_norm: float

    @property
    def relative_error(self) -> float:
        """Norm of the error divided by the norm of the weight; 0 for a weight of zeros."""
        return math.sqrt(self.squared_error / self.squared_norm) if self.squared_norm else 0.0


class Method(Protocol):
    """A way to quantize one weight at a time.

    Invariants: the result depends on the arguments only, not on `threads`, nor on other weights; all scales are
    finite; the result's bits, group size and symmetry are those of `scheme`.
    """

    name: str
    types: tuple[str, ...]
    needs_calibration: bool

    def quantize(
        self,
        name: str,
        weight: NDArray[Any],
        scheme: TensorScheme,
        calibration: Calibration | None = None,
        *,
        threads: int | None = None,
    ) -> QuantizedWeight:
        """Quantize `weight`, float32, float16 or bfloat16 `[..., N, K]`, which may be memory-mapped.

        `name` is for messages. `calibration` is given when `needs_calibration`, and may be given otherwise.
        `threads` defaults to the processors this process may use. Raises QuantizationError.
        """
        ...


_METHODS: dict[str, Method] = {}


def register(method: Method) -> None:
    """Make a method available under its name."""
    if method.name in _METHODS:
        raise ValueError(f"a quantization method named {method.name!r} is already registered")
    _METHODS[method.name] = method


def available_methods() -> dict[str, Method]:
    """Return the registered methods by name."""
    return dict(sorted(_METHODS.items()))


def method_named(name: str) -> Method:
    """Return a registered method; `name` has passed `parse_scheme`."""
    return _METHODS[name]

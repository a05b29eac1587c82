"""The contracts of quantization methods and of foldings, and the registries that know them by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from inferencex.formats.packing import QuantizedTensor

if TYPE_CHECKING:
    from inferencex.convert.quantize.scheme import TensorScheme


@dataclass(frozen=True, eq=False)
class Calibration:
    """What the inputs of one weight looked like over the calibration samples.

    mean_square:   float32 `[K]`, or `[E, K]` for experts: mean of the squared input, by input channel; finite, >= 0
    gram:          float32 `[K, K]`, or `[E, K, K]`: mean over tokens of x x^T, summed in float32 or better; symmetric
                   to the last bit, its diagonal close to `mean_square`; None where no method asked for it
    absolute_max:  float32 `[K]`, or `[E, K]`: largest magnitude of the input; None where nothing asked for it
    tokens:        how many inputs were seen; with none the rest says nothing
    """

    mean_square: NDArray[np.float32]
    gram: NDArray[np.float32] | None = None
    absolute_max: NDArray[np.float32] | None = None
    tokens: int = 1


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A quantized weight, and how far it is from the one it replaces.

    squared_error:  sum over the weight of (weight - dequantized)^2
    squared_norm:   sum over the weight of weight^2
    remark:         what a report should say of it, such as why another method had to do; usually empty
    """

    tensor: QuantizedTensor
    squared_error: float
    squared_norm: float
    remark: str = ""

    @property
    def relative_error(self) -> float:
        """Norm of the error divided by the norm of the weight; 0 for a weight of zeros."""
        return math.sqrt(self.squared_error / self.squared_norm) if self.squared_norm else 0.0


class Method(Protocol):
    """A way to quantize one weight at a time.

    Invariants: the result depends on the arguments only, not on `threads`, nor on other weights; all scales are
    finite; the result's bits, group size and symmetry are those of `scheme`.

    needs_gram:  whether `quantize` reads `Calibration.gram`
    """

    name: str
    types: tuple[str, ...]
    needs_calibration: bool
    needs_gram: bool

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


class Folding(Protocol):
    """A way to choose factors of input channels: weights become W * s, their inputs x / s, which changes no output.

    What computes the inputs absorbs the division. Invariants: the result depends on the arguments only, not on
    `threads`; all factors are finite and positive, and their float32 quotients by each other are.
    """

    name: str
    needs_gram: bool

    def scales(
        self,
        name: str,
        weights: Sequence[NDArray[np.float32]],
        schemes: Sequence[TensorScheme],
        calibration: Calibration,
        *,
        ties: NDArray[np.int64] | None = None,
        threads: int | None = None,
    ) -> NDArray[np.float32]:
        """Return the factors, float32 `[K]`, for `weights` `[N_i, K]` that read one input; all 1 when none are better.

        `name` is for messages. Channels with the same number in `ties` get the same factor. Raises QuantizationError.
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


_FOLDINGS: dict[str, Folding] = {}


def register_folding(folding: Folding) -> None:
    """Make a folding available under its name."""
    if folding.name in _FOLDINGS:
        raise ValueError(f"a folding named {folding.name!r} is already registered")
    _FOLDINGS[folding.name] = folding


def available_foldings() -> dict[str, Folding]:
    """Return the registered foldings by name."""
    return dict(sorted(_FOLDINGS.items()))


def folding_named(name: str) -> Folding:
    """Return a registered folding."""
    return _FOLDINGS[name]

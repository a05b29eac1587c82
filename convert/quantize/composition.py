"""Which steps the name of a method stands for."""

from __future__ import annotations

from dataclasses import dataclass

from inferencex.convert.quantize.base import Folding, Method, available_foldings, available_methods


@dataclass(frozen=True)
class Composition:
    """The steps of a method: factors for input channels, then numbers for each weight.

    folding:   chooses the factors; None leaves channels as they are
    rounding:  quantizes each weight
    """

    folding: Folding | None
    rounding: Method

    @property
    def needs_calibration(self) -> bool:
        """Whether any step needs to know what weights read."""
        return self.folding is not None or self.rounding.needs_calibration

    @property
    def needs_gram(self) -> bool:
        """Whether any step reads the Gram matrix of an input."""
        return self.rounding.needs_gram or (self.folding is not None and self.folding.needs_gram)

    @property
    def types(self) -> tuple[str, ...]:
        """The types of weights that it makes; folding is for integers, and smoothing for INT8 with INT8 inputs."""
        if self.folding is None:
            return self.rounding.types
        if self.folding.name == SMOOTHING:
            return tuple(kind for kind in self.rounding.types if kind == "int8")
        return tuple(kind for kind in self.rounding.types if kind.startswith("int"))

    @property
    def quantizes_inputs(self) -> bool:
        """Whether it is made for linears whose inputs are quantized by the graph."""
        return self.folding is not None and self.folding.name == SMOOTHING


SMOOTHING = "smoothquant"


def compositions() -> dict[str, Composition]:
    """Return every method by name: each rounding alone, each folding before rounding to nearest, and both joined.

    `rtn`, `gptq`; `awq` and `smoothquant`, which mean rounding to nearest; `awq+gptq`, `smoothquant+gptq`.
    """
    roundings, foldings = available_methods(), available_foldings()
    found = {name: Composition(None, method) for name, method in roundings.items()}
    for name, folding in foldings.items():
        for rounding, method in roundings.items():
            found[name if rounding == "rtn" else f"{name}+{rounding}"] = Composition(folding, method)
    return found

"""How much time a method may take."""

from __future__ import annotations

from inferencex.convert.quantize.awq import Awq
from inferencex.convert.quantize.composition import Composition
from inferencex.convert.quantize.gptq import Gptq

EFFORTS = ("fast", "normal", "best")
"""How much time a method may take; `best` refines what `normal` makes."""


def hurried(composition: Composition) -> Composition:
    """Return the steps of `fast`: error feedback without descent afterwards, factors from a coarse grid."""
    folding, rounding = composition.folding, composition.rounding
    return Composition(
        Awq(input_powers=(0.0, 0.3), weight_powers=(0.0, 0.3)) if isinstance(folding, Awq) else folding,
        Gptq(sweeps=0) if isinstance(rounding, Gptq) else rounding,
    )

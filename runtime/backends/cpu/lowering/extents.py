"""Sizes that depend on the step: a number, times the tokens or the logit rows of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

from inferencex.formats.errors import BackendError


class Symbol(IntEnum):
    """What a size is a multiple of; the numbers are those of the native module."""

    NONE = 0
    TOKENS = 1
    ROWS = 2


_NAMES = {"tokens": Symbol.TOKENS, "rows": Symbol.ROWS}


class Extent(NamedTuple):
    """`coefficient`, times the number that `symbol` names. A coefficient of 0 has no symbol: `Extent.of` sees to it.

    A tuple, for lowering makes, compares and hashes thousands of them: where it may be that or a tuple of several, ask
    whether it is an Extent.
    """

    coefficient: int
    symbol: Symbol = Symbol.NONE

    @classmethod
    def of(cls, coefficient: int, symbol: Symbol) -> Extent:
        """Return the size of a coefficient that may be 0."""
        return cls(coefficient, symbol if coefficient else Symbol.NONE)

    @property
    def is_constant(self) -> bool:
        """Tell whether the size is the same in every step."""
        return self.symbol is Symbol.NONE

    def __mul__(self, other: Extent) -> Extent:  # type: ignore[override]  # sizes are multiplied, not repeated
        """Return the product. Raises BackendError for one that grows with the square of a step."""
        coefficient, symbol = self
        other_coefficient, other_symbol = other
        if other_symbol is Symbol.NONE:
            if other_coefficient == 1:
                return self
        elif symbol is Symbol.NONE:
            if coefficient == 1:
                return other
            symbol = other_symbol
        elif coefficient and other_coefficient:
            raise BackendError(f"a size of {self} times {other} grows faster than a step; the CPU backend has none")
        coefficient *= other_coefficient
        return Extent(coefficient, symbol if coefficient else Symbol.NONE)

    def divided_by(self, other: Extent) -> Extent | None:
        """Return the quotient where it is a whole multiple, else None."""
        if other.coefficient == 0 or self.coefficient % other.coefficient:
            return None
        if other.is_constant:
            return Extent.of(self.coefficient // other.coefficient, self.symbol)
        return Extent(self.coefficient // other.coefficient) if self.symbol is other.symbol else None

    def at(self, tokens: int, rows: int) -> int:
        """Return the size in a step."""
        return self.coefficient * (1, tokens, rows)[self.symbol]

    def __str__(self) -> str:
        if self.is_constant:
            return str(self.coefficient)
        return f"{self.coefficient}*{self.symbol.name.lower()}" if self.coefficient != 1 else self.symbol.name.lower()


ONE = Extent(1)


def product(extents: Iterable[Extent]) -> Extent:
    """Return the product of sizes."""
    return math.prod(extents, start=ONE)


def extent_named(dimension: int | str | None) -> Extent | None:
    """Return the size that a dimension of the graph states (`576`, `tokens`, `2*tokens`), or None."""
    if isinstance(dimension, int):
        return Extent(dimension)
    factor, _, name = (dimension or "").rpartition("*")
    symbol = _NAMES.get(name.strip())
    if symbol is None or (factor and not factor.strip().isdecimal()):
        return None
    return Extent.of(int(factor) if factor else 1, symbol)

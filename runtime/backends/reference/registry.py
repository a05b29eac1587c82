"""A table of operators, and what their implementations share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

Operator = Callable[..., Any]
_Function = TypeVar("_Function", bound=Operator)


class Registry(dict[tuple[str, str], Operator]):
    """Implementations of operators by `(domain, name)`.

    An implementation takes the node's inputs (absent optional ones are None) and its attributes as keyword arguments,
    and returns one tensor or a tuple. Activations are float32.
    """

    def operator(self, name: str, domain: str = "") -> Callable[[_Function], _Function]:
        """Register a function as the implementation of an operator."""

        def register(function: _Function) -> _Function:
            self[(domain, name)] = function
            return function

        return register


def integers(x: Tensor | None) -> list[int] | None:
    """Return a tensor of any shape as a flat list of integers; None when it is absent."""
    return None if x is None else [int(i) for i in x.reshape(-1).tolist()]

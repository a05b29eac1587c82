"""Adam on one tensor, in place."""

from __future__ import annotations

import torch
from torch import Tensor

_TINY = 1e-20


class Adam:
    """Adam (arXiv 1412.6980) with its bias correction, for one tensor.

    A step moves an element by about the rate, whatever the size of its gradient: gradients may be sums or means.
    The result depends on the arguments alone, since every element is computed by itself.
    """

    def __init__(self, like: Tensor, momentum: float = 0.9, memory: float = 0.95) -> None:
        self._momentum, self._memory, self._steps = momentum, memory, 0
        self._mean = torch.zeros_like(like, dtype=torch.float32)
        self._square = torch.zeros_like(like, dtype=torch.float32)

    def update(self, value: Tensor, gradient: Tensor, rate: float) -> None:
        """Move `value` against `gradient`, both float32 of one shape."""
        self._steps += 1
        self._mean.mul_(self._momentum).add_(gradient, alpha=1.0 - self._momentum)
        self._square.mul_(self._memory).addcmul_(gradient, gradient, value=1.0 - self._memory)
        corrected = self._square / (1.0 - self._memory**self._steps)
        size = rate / (1.0 - self._momentum**self._steps)
        value.addcdiv_(self._mean, corrected.sqrt_().add_(_TINY), value=-size)

    def state(self) -> dict[str, Tensor]:
        """Return what `load_state` needs to go on from here."""
        return {"mean": self._mean, "square": self._square, "steps": torch.tensor(self._steps)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on from a state."""
        self._mean.copy_(state["mean"])
        self._square.copy_(state["square"])
        self._steps = int(state["steps"])

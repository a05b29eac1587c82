"""PyTorch's pickled weights (`.bin`), read only on request and only with the restricted unpickler."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

import torch

from inferencex.formats.errors import SourceError


@dataclass(frozen=True)
class PickledHandle:
    """A tensor of a `.bin` file, mapped into memory by torch."""

    name: str
    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each axis."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """As stored."""
        return self.tensor.dtype

    @property
    def stored(self) -> str:
        """The dtype's torch name."""
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements."""
        return self.tensor.numel() * self.tensor.element_size()

    def load(self) -> torch.Tensor:
        """Return the mapped tensor."""
        return self.tensor.detach()

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return rows `start:stop` of the first axis."""
        return self.tensor.detach()[start:stop]


def read_pickle(path: Path) -> dict[str, PickledHandle]:
    """Map the tensors of a pickled state dict, which `torch.save` wrote.

    Uses `weights_only`, which builds tensors and plain containers and runs nothing else. Raises SourceError
    when the file is damaged, holds anything else, or predates PyTorch 1.6's zip format (which has no mapping).
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise SourceError(f"{path}: cannot be read as a zip-format state dict of tensors only ({error})") from error
    if not isinstance(state, dict):
        raise SourceError(f"{path}: holds a {type(state).__name__}, expected a dict of tensors")
    odd = [name for name, value in state.items() if not isinstance(name, str) or not isinstance(value, torch.Tensor)]
    if odd:
        raise SourceError(f"{path}: these entries are not tensors: {', '.join(map(str, odd[:10]))}")
    return {name: PickledHandle(name, tensor) for name, tensor in state.items()}

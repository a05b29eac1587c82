"""Where the value of one model parameter comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch._subclasses.fake_tensor import FakeTensor

from inferencex.convert.source.base import TensorHandle
from inferencex.formats.errors import SourceError


@dataclass(frozen=True)
class ParameterSource:
    """A recipe for one parameter (or persistent buffer) of a model, run only when asked.

    name:     of the parameter in the model's state dict
    shape:    of the parameter; `load` returns exactly this
    dtype:    of the tensor that `load` returns: the stored one, never cast up
    sources:  names of the tensors in the checkpoint that it is made from; empty for made-up values
    tied_to:  the parameter that this one is the same as, when the model ties them; both have equal recipes
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: tuple[str, ...]
    load_whole: Callable[[], torch.Tensor] = field(repr=False, compare=False)
    load_rows: Callable[[int, int], torch.Tensor] | None = field(default=None, repr=False, compare=False)
    tied_to: str | None = None

    def load(self) -> torch.Tensor:
        """Return the value, a memory-mapped view where nothing has to be converted. Raises SourceError."""
        value = self.load_whole()
        if tuple(value.shape) != self.shape:
            raise SourceError(
                f"parameter {self.name!r} has shape {self.shape}, but its sources {', '.join(self.sources)} "
                f"give {tuple(value.shape)}"
            )
        return value

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return `load()[start:stop]`, reading only what is needed where the recipe allows it."""
        if self.load_rows is None:
            return self.load()[start:stop]
        return self.load_rows(start, stop)


def has_values(tensor: torch.Tensor) -> bool:
    """Whether `tensor` holds numbers, rather than only a shape (on the meta device, or fake)."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def direct(name: str, handle: TensorHandle) -> ParameterSource:
    """A parameter stored just as the model wants it."""
    return ParameterSource(name, handle.shape, handle.dtype, (handle.name,), handle.load, handle.rows)

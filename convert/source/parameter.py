"""Where the value of one model parameter comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch._subclasses.fake_tensor import FakeTensor

from inferencex.convert.source.base import TensorHandle
from inferencex.convert.source.packed.base import PackedHandle
from inferencex.formats.errors import SourceError
from inferencex.formats.packing import QuantizedTensor


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


@dataclass(frozen=True)
class PackedParameter(ParameterSource):
    """A parameter that the checkpoint stores quantized; `load` returns what it stands for, in float32.

    packed:       returns the stored numbers as they are, input channels in `input_order`; None where those of its
                  parts do not fit into one tensor
    input_order:  returns the input channel, int64 `[K]`, at each place of `packed()`; None for 0, 1, 2, ...
    method:       that quantized it, as the checkpoint names it
    format:       how it is stored in the checkpoint, in words
    nbytes:       in the checkpoint, all its tensors together
    """

    packed: Callable[[], QuantizedTensor | None] = field(kw_only=True, repr=False, compare=False)
    input_order: Callable[[], NDArray[np.int64] | None] = field(kw_only=True, repr=False, compare=False)
    method: str = field(kw_only=True)
    format: str = field(kw_only=True)
    nbytes: int = field(kw_only=True)

    def dequantized(self) -> ParameterSource:
        """Return the same parameter as a plain one."""
        return ParameterSource(
            self.name, self.shape, self.dtype, self.sources, self.load_whole, self.load_rows, self.tied_to
        )


def has_values(tensor: torch.Tensor) -> bool:
    """Whether `tensor` holds numbers, rather than only a shape (on the meta device, or fake)."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def direct(name: str, handle: TensorHandle) -> ParameterSource:
    """A parameter stored just as the model wants it."""
    if isinstance(handle, PackedHandle):
        return PackedParameter(
            name,
            handle.shape,
            handle.dtype,
            tuple(part.name for part in handle.storage.parts),
            handle.load,
            handle.rows,
            packed=handle.packed,
            input_order=handle.input_order,
            method=handle.storage.method,
            format=handle.stored,
            nbytes=handle.nbytes,
        )
    return ParameterSource(name, handle.shape, handle.dtype, (handle.name,), handle.load, handle.rows)

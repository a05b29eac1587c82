"""Read a small block-quantized checkpoint in the background while its model is being captured.

Capturing keeps one core busy with Python; dequantizing needs the other. Both the packing and the comparison with the
source then find the tensors ready.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace

import torch

from inferencex.convert.source.base import Checkpoint, TensorHandle
from inferencex.formats.errors import SourceError

_LARGEST = 1 << 30  # bytes of dequantized tensors that are kept in memory


class KeptTensor:
    """A tensor that is read once and stays in memory."""

    def __init__(self, handle: TensorHandle) -> None:
        self._handle = handle
        self._lock = threading.Lock()
        self._value: torch.Tensor | None = None
        self.name, self.shape, self.dtype = handle.name, handle.shape, handle.dtype
        self.stored, self.nbytes = handle.stored, handle.nbytes

    def load(self) -> torch.Tensor:
        """Return the whole tensor; not to be written to."""
        with self._lock:
            if self._value is None:
                self._value = self._handle.load()
            return self._value

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return `load()[start:stop]`."""
        return self.load()[start:stop]


def _read(handles: Iterable[TensorHandle]) -> None:
    for handle in handles:
        try:
            handle.load()
        except SourceError:
            return  # whoever needs the tensor gets the same error


def read_ahead(checkpoint: Checkpoint) -> Checkpoint:
    """Return `checkpoint` with its tensors being read, if dequantizing them is work and they fit in a GiB."""
    elements = sum(torch.Size(handle.shape).numel() for handle in checkpoint.tensors.values())
    if checkpoint.kind != "gguf" or 4 * elements > _LARGEST:
        return checkpoint
    tensors: dict[str, TensorHandle] = {name: KeptTensor(handle) for name, handle in checkpoint.tensors.items()}
    threading.Thread(target=_read, args=(list(tensors.values()),), name="read ahead", daemon=True).start()
    return replace(checkpoint, tensors=tensors)

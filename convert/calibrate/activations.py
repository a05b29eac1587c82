"""Activations of all samples, kept in memory up to a limit and on disk beyond it."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import torch
from torch import Tensor


class ActivationStore:
    """Keeps tensors by key. Safe to use from several threads.

    directory:  where tensors go that do not fit; made by the caller, who also removes it
    limit:      bytes that all tensors in memory may take together
    """

    def __init__(self, directory: Path, limit: int) -> None:
        self._directory, self._limit = directory, limit
        self._memory: dict[str, Tensor] = {}
        self._files: dict[str, tuple[Path, torch.dtype, torch.Size]] = {}
        self._used = self._written = self._names = 0
        self._lock = threading.Lock()

    @property
    def spilled_bytes(self) -> int:
        """Bytes written to disk so far."""
        return self._written

    def put(self, key: str, tensor: Tensor) -> None:
        """Keep a tensor under a key that is free."""
        tensor = tensor.detach().contiguous()
        size = tensor.numel() * tensor.element_size()
        with self._lock:
            if key in self._memory or key in self._files:
                raise KeyError(f"{key!r} is kept already")
            fits = self._used + size <= self._limit
            if fits:
                self._used += size
                self._memory[key] = tensor
                return
            self._names += 1
            self._written += size
            path = self._directory / f"activations-{self._names}"
        tensor.reshape(-1).view(torch.uint8).numpy().tofile(path)
        with self._lock:
            self._files[key] = (path, tensor.dtype, tensor.shape)

    def get(self, key: str) -> Tensor:
        """Return the tensor kept under `key`; not to be written to."""
        if key in self._memory:
            return self._memory[key]
        path, dtype, shape = self._files[key]
        if not math.prod(shape):
            return torch.empty(shape, dtype=dtype)
        return torch.from_file(str(path), shared=False, size=math.prod(shape), dtype=dtype).reshape(shape)

    def drop(self, key: str) -> None:
        """Forget a tensor and free what it took."""
        with self._lock:
            tensor = self._memory.pop(key, None)
            if tensor is not None:
                self._used -= tensor.numel() * tensor.element_size()
                return
            path, _, _ = self._files.pop(key)
        path.unlink()

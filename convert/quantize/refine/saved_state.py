"""A refinement's state on disk, so that one that was interrupted need not begin again."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from inferencex.convert.quantize.refine.parameters import Refinable, Snapshot
from inferencex.formats.errors import OptionError

if TYPE_CHECKING:
    from inferencex.convert.quantize.refine.descent import Schedule

_ARRAYS = ("values", "scales", "zero_points")


class SavedState:
    """One file, replaced as a whole; it belongs to one beginning and one schedule."""

    def __init__(self, path: Path, refinable: Refinable, schedule: Schedule) -> None:
        self._path, self._refinable = path, refinable
        self._fingerprint = _fingerprint(refinable, schedule)

    def write(self, facts: dict[str, Any], best: Snapshot) -> None:
        """Write `facts`, made of tensors, numbers, texts, lists and dicts, and the best result so far."""
        arrays = {
            name: {key: torch.from_numpy(array) for key in _ARRAYS if (array := getattr(tensor, key)) is not None}
            for name, tensor in best.weights.items()
        }
        content = {"fingerprint": self._fingerprint, "facts": facts, "weights": arrays, "plain": best.plain}
        partial = self._path.with_name(self._path.name + ".partial")
        with partial.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._path)

    def read(self) -> tuple[dict[str, Any], Snapshot] | None:
        """Return what was written last; None when nothing was. Raises OptionError when it belongs to another call."""
        if not self._path.exists():
            return None
        content = torch.load(self._path, weights_only=True, map_location="cpu")
        if content["fingerprint"] != self._fingerprint:
            raise OptionError(
                f"{self._path}: holds the state of another refinement, with other weights or another schedule; "
                "remove it, or give another folder to work in"
            )
        weights = {
            name: replace(first, **{key: array.numpy() for key, array in content["weights"][name].items()})
            for name, first in self._refinable.weights.items()
        }
        return content["facts"], Snapshot(weights, content["plain"])


def _fingerprint(refinable: Refinable, schedule: Schedule) -> str:
    digest = hashlib.sha256(repr(schedule).encode())
    for name, tensor in sorted(refinable.weights.items()):
        digest.update(f"{name} {tensor.shape} {tensor.bits} {tensor.group_size} {tensor.symmetric}".encode())
        for key in _ARRAYS:
            array = getattr(tensor, key)
            if array is not None:
                digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    for name, plain in sorted(refinable.plain.items()):
        digest.update(f"{name} {plain.dtype}".encode())
        digest.update(plain.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()

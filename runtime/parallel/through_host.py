"""Exchanges of torch's tensors by a communicator of arrays. Importing this imports torch."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from inferencex.runtime.parallel.communicator import Communicator


class ThroughHost:
    """Takes tensors on any device, of any type of floats, to the host and back; see `Communicator`.

    arrays: exchanges float32 arrays
    """

    can_be_recorded = False

    def __init__(self, arrays: Communicator) -> None:
        self._arrays = arrays
        self.rank, self.size, self.keeps_store = arrays.rank, arrays.size, arrays.keeps_store

    def all_reduce(self, array: Tensor) -> None:
        """Add up in float32, and round to the tensor's type."""
        floats = _on_host(array)
        self._arrays.all_reduce(floats)
        array.copy_(torch.from_numpy(floats))

    def all_gather(self, part: Tensor, whole: Tensor, sizes: list[int]) -> None:
        """Gather in float32, which holds every number of the narrower types."""
        floats = torch.empty(whole.shape, dtype=torch.float32)
        self._arrays.all_gather(_on_host(part), floats.numpy(), sizes)
        whole.copy_(floats)

    def abort(self) -> None:
        """End the exchanges of arrays."""
        self._arrays.abort()


def _on_host(tensor: Tensor) -> NDArray[Any]:
    """Return a copy that no other tensor shares."""
    array: NDArray[Any] = tensor.detach().to(device="cpu", dtype=torch.float32, copy=True).contiguous().numpy()
    return array

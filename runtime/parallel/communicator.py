"""What ranks exchange results with, whatever carries it."""

from __future__ import annotations

from typing import Any, Protocol

from inferencex.formats.errors import BackendError


class Communicator(Protocol):
    """One rank's end. Arrays are what the backend computes with: numpy's on the CPU, torch's tensors on devices.

    All ranks call the same methods in the same order with arrays of fitting shapes. A rank that cannot go on makes the
    others' calls raise BackendError.

    rank, size: which rank this is, of how many
    """

    @property
    def rank(self) -> int:
        """Which rank this is, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def all_reduce(self, array: Any) -> None:
        """Replace every element by the sum over all ranks, float32, C-contiguous.

        What a row becomes does not depend on what other rows there are: ranks are added in their order.
        """
        ...

    def all_gather(self, part: Any, whole: Any, sizes: list[int]) -> None:
        """Fill `whole`, `[rows, sum(sizes)]`, with the parts of all ranks, `[rows, sizes[rank]]`, side by side."""
        ...


class Unconnected:
    """Stands for a communicator where a graph is only looked at; exchanges raise BackendError."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, array: Any) -> None:
        """Raise BackendError."""
        raise BackendError(f"rank {self.rank} is not connected with the others")

    def all_gather(self, part: Any, whole: Any, sizes: list[int]) -> None:
        """Raise BackendError."""
        raise BackendError(f"rank {self.rank} is not connected with the others")

"""What ranks exchange results with, whatever carries it."""

from __future__ import annotations

from typing import Any, Protocol

from inferencex.formats.errors import BackendError


class LostRankError(BackendError):
    """Another rank did not come to an exchange; who, and why, is known to whoever watches the processes."""


class Communicator(Protocol):
    """One rank's end. Arrays are what the backend computes with: numpy's on the CPU, torch's tensors on devices.

    All ranks call the same methods in the same order with arrays of fitting shapes. A rank that cannot go on makes the
    others' calls raise LostRankError, or `abort` ends them.

    rank, size:      which rank this is, of how many
    can_be_recorded: whether exchanges may be part of a recorded step of a device, and are run anew with it
    keeps_store:     whether ranks still read where they found each other when all of them have
    """

    @property
    def rank(self) -> int:
        """Which rank this is, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def can_be_recorded(self) -> bool:
        """Whether nothing in an exchange waits for the host."""
        ...

    @property
    def keeps_store(self) -> bool:
        """Whether the store has to stay as long as the ranks do."""
        ...

    def all_reduce(self, array: Any) -> None:
        """Replace every element by the sum over all ranks, the same on all of them; floats, C-contiguous.

        On the CPU, float32: what a row becomes does not depend on what other rows there are, for ranks are added in
        their order. Devices add in the order and the type that is fastest there.
        """
        ...

    def all_gather(self, part: Any, whole: Any, sizes: list[int]) -> None:
        """Fill `whole`, `[rows, sum(sizes)]`, with the parts of all ranks, `[rows, sizes[rank]]`, side by side."""
        ...

    def abort(self) -> None:
        """End exchanges that wait for other ranks, now and from now on; any thread may call it, more than once.

        What an exchange that was ended leaves is arbitrary: the caller knows that it has failed.
        """
        ...


class Unconnected:
    """Stands for a communicator where a graph is only looked at; exchanges raise BackendError."""

    can_be_recorded = False
    keeps_store = False

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, array: Any) -> None:
        """Raise BackendError."""
        raise BackendError(f"rank {self.rank} is not connected with the others")

    def all_gather(self, part: Any, whole: Any, sizes: list[int]) -> None:
        """Raise BackendError."""
        raise BackendError(f"rank {self.rank} is not connected with the others")

    def abort(self) -> None:
        """Do nothing: nobody waits."""

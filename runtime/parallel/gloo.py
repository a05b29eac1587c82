"""Exchanges over gloo, torch's collectives for CPUs. Importing this imports torch."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray

from inferencex.formats.errors import BackendError
from inferencex.runtime.parallel.communicator import LostRankError

PATIENCE = 300.0
"""Seconds after which a rank that does not come to an exchange counts as lost; one that has died is noticed at once."""

_SMALL = 1 << 14  # elements of which it is faster to send all to everybody

Floats = NDArray[np.float32]
_dist: Any = torch.distributed  # groups of one's own, beside those that a program may have, are not in its type hints


class GlooCommunicator:
    """One rank's end; see `Communicator`. All ranks are on this machine, and talk over its loopback interface.

    store: a path that no file is at yet; the ranks find each other there
    """

    can_be_recorded = False
    keeps_store = False

    def __init__(self, store: str, rank: int, size: int, patience: float = PATIENCE) -> None:
        self.rank, self.size = rank, size
        options = _dist.ProcessGroupGloo._Options()
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=patience)
        try:
            self._group = _dist.ProcessGroupGloo(_dist.FileStore(store, size), rank, size, options)
        except RuntimeError as error:
            raise BackendError(f"rank {rank} does not find the other ranks: {error}") from error
        self._buffer = torch.empty(0)

    def all_reduce(self, array: Floats) -> None:
        """Add up in the order of the ranks, whoever does it: gloo's own sum depends on where an element lies."""
        flat = array.reshape(-1)
        if self.size == 2 or flat.size <= _SMALL:
            self._add(self._everything(flat), flat)
            return
        each = -(-flat.size // self.size)
        mine = np.zeros((self.size, each), dtype=np.float32)
        mine.reshape(-1)[: flat.size] = flat
        theirs = np.empty_like(mine)
        self._wait(self._group.alltoall_base(torch.from_numpy(theirs), torch.from_numpy(mine), [], []))
        total = np.empty(each, dtype=np.float32)
        self._add(theirs, total)
        flat[...] = self._everything(total).reshape(-1)[: flat.size]

    def all_gather(self, part: Floats, whole: Floats, sizes: list[int]) -> None:
        """Send as many columns as the widest part has, so that all send alike."""
        rows, width = len(part), max(sizes)
        padded = np.zeros((rows, width), dtype=np.float32)
        padded[:, : part.shape[1]] = part
        start = 0
        for columns, size in zip(self._everything(padded.reshape(-1)).reshape(-1, rows, width), sizes, strict=True):
            whole[:, start : start + size] = columns[:, :size]
            start += size

    def _everything(self, flat: Floats) -> Floats:
        """Return what all ranks bring, `[ranks, elements]`, valid until the next exchange."""
        wanted = self.size * flat.size
        if self._buffer.numel() < wanted:
            self._buffer = torch.empty(wanted)
        result = self._buffer[:wanted]
        self._wait(self._group._allgather_base(result, torch.from_numpy(flat)))
        found: Floats = result.numpy().reshape(self.size, flat.size)
        return found

    def abort(self) -> None:
        """Do nothing: the sockets of a process that has ended are closed, and whoever waits for it is told."""

    @staticmethod
    def _add(terms: Floats, total: Floats) -> None:
        np.add(terms[0], terms[1], out=total)
        for term in terms[2:]:
            total += term

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise LostRankError(f"rank {self.rank} has lost another rank: {str(error).splitlines()[0]}") from error

"""Exchanges between GPUs over NCCL, which is RCCL in torch's builds for ROCm. Importing this imports torch."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from inferencex.formats.errors import BackendError
from inferencex.runtime.parallel.communicator import LostRankError

_PATIENCE = 300.0
"""Seconds in which all ranks have to find each other."""

_LAUNCH_PATIENCE = 1.0
"""Seconds that a launch may take which is not stuck."""

_dist: Any = torch.distributed
_c10d: Any = torch.distributed.distributed_c10d
_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class NcclCommunicator:
    """One rank's end, with a GPU of its own; see `Communicator`. Exchanges run on the stream that is current.

    store:  a path that no file is at yet, and that stays as long as the ranks do: they find each other there
    device: of this rank; no other rank may have it

    Raises BackendError when torch has no NCCL, or the ranks do not find each other.
    """

    can_be_recorded = True
    keeps_store = True

    def __init__(self, store: str, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._is_aborted = False
        self._launching = threading.Lock()
        if not _dist.is_nccl_available():
            raise BackendError(
                f"this torch ({torch.__version__}) is built without NCCL, by which ranks on GPUs exchange results; "
                "install a build for CUDA or ROCm on Linux"
            )
        # Otherwise torch ends this process, which may serve other models, when another rank does not come. The
        # processes are watched here, and `abort` is called when one has ended.
        os.environ.setdefault(_HANDLING, "0")
        settings = _dist.ProcessGroupNCCL.Options()
        settings._timeout = timedelta(seconds=_PATIENCE)
        try:
            self._group = _dist.ProcessGroupNCCL(_dist.FileStore(store, size), rank, size, settings)
            self.all_reduce(torch.zeros(1, device=device))  # the first exchange connects, and no recording may do that
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise BackendError(f"rank {rank} on {device} does not find the other ranks: {error}") from error

    def all_reduce(self, array: Tensor) -> None:
        """Add up in the tensor's own type; which ranks are added first depends on where an element lies."""
        settings = _c10d.AllreduceOptions()
        settings.asyncOp = False
        with self._launch():
            self._done(self._group.allreduce([array], settings))

    def all_gather(self, part: Tensor, whole: Tensor, sizes: list[int]) -> None:
        """Send as many columns as the widest part has, so that all send alike."""
        rows, width = part.shape[0], max(sizes)
        sent = part.contiguous() if part.shape[1] == width else part.new_zeros((rows, width))
        if part.shape[1] != width:
            sent[:, : part.shape[1]] = part
        gathered = part.new_empty((self.size, rows, width))
        settings = _c10d.AllgatherOptions()
        settings.asyncOp = False
        with self._launch():
            self._done(self._group._allgather_base(gathered, sent, settings))
        torch.cat([gathered[rank, :, :size] for rank, size in enumerate(sizes)], dim=1, out=whole)

    def abort(self) -> None:
        """End the kernels that wait for other ranks."""
        self._is_aborted = True
        # A launch behind this would connect anew, and wait for ranks that are gone; but one that waits for a device
        # which waits for them ends only by this.
        is_between = self._launching.acquire(timeout=_LAUNCH_PATIENCE)
        try:
            self._group.abort()
        finally:
            if is_between:
                self._launching.release()

    @staticmethod
    def _done(work: Any) -> None:
        """Let the current stream wait for an exchange, where it runs on another one."""
        if work is not None:
            work.wait()

    @contextlib.contextmanager
    def _launch(self) -> Iterator[None]:
        try:
            with self._launching:
                if self._is_aborted:
                    raise LostRankError(f"rank {self.rank} has lost another rank")
                yield
        except _dist.DistBackendError as error:
            raise LostRankError(f"rank {self.rank} has lost another rank: {str(error).splitlines()[0]}") from error

"""What ranks on devices of their own have to do alike: the size of the pool, and which decode steps are recorded.

A step that one rank records and another replays would have other exchanges, and never end.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inferencex.runtime.backends.triton.decode_graphs import Record, Recording
from inferencex.runtime.parallel.communicator import Communicator

_DIGITS = 4
_DIGIT_BITS = 16  # float32 holds such integers exactly


def numbers_of_ranks(communicator: Communicator, number: int, device: torch.device) -> list[int]:
    """Return what each rank says, from 0 to 2**64 - 1, in the order of the ranks, who call this at the same time."""
    digits = [number >> (_DIGIT_BITS * place) & ((1 << _DIGIT_BITS) - 1) for place in range(_DIGITS)]
    part = torch.tensor([digits], dtype=torch.float32, device=device)
    whole = torch.empty((1, _DIGITS * communicator.size), dtype=torch.float32, device=device)
    communicator.all_gather(part, whole, [_DIGITS] * communicator.size)
    rows = whole.view(communicator.size, _DIGITS).tolist()
    return [sum(int(digit) << (_DIGIT_BITS * place) for place, digit in enumerate(row)) for row in rows]


class AgreeingRecorder:
    """Makes recordings whose size is that of the largest rank, so that all ranks drop them in the same step."""

    def __init__(self, record: Record, communicator: Communicator, device: torch.device) -> None:
        self._record, self._communicator, self._device = record, communicator, device

    def __call__(self, launch: Callable[[], Tensor]) -> Recording:
        """Record a step, which all ranks do at the same time."""
        recording = self._record(launch)
        recording.nbytes = max(numbers_of_ranks(self._communicator, recording.nbytes, self._device))
        return recording

    def start_over(self) -> None:
        """Take a new pool; all ranks do, for their recordings are of the same size."""
        self._record.start_over()

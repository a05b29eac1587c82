"""Decode steps recorded once and replayed: launching hundreds of kernels one by one takes longer than they run.

A step that is recorded reads fixed addresses and has fixed grids, so there is one recording for each *bucket*: a number
of sequences and a longest context, to which steps are filled up with sequences that are none. Recordings are made when
first needed and share one pool of memory. What one of them gives back stays in that pool, for others, so that when it
grows beyond its budget all go, and those that are needed are made anew.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inferencex.runtime.backends.triton.kernels.split_sums import SplitSums
from inferencex.runtime.backends.triton.step_inputs import StepInputs
from inferencex.runtime.backends.triton.step_plan import DecodeBucket, StepBuffer, StepPlan

_LOG = logging.getLogger(__name__)

_ONE_AT_A_TIME = threading.Lock()
"""torch records one graph in a process at a time; several models may each have a thread."""

_SHORTEST_CONTEXT = 1024
_CONTEXT_GROWTH = 4

Launch = Callable[[StepInputs], Tensor]
Prepare = Callable[[StepInputs], None]


class Recording(Protocol):
    """A step that can be run again on what its buffer holds by then."""

    output: Tensor
    nbytes: int

    def replay(self) -> None:
        """Run it on the current stream; `output` has the result afterwards."""
        ...


class Record(Protocol):
    """What makes recordings, in a pool of memory of their own."""

    def __call__(self, launch: Callable[[], Tensor]) -> Recording:
        """Run a function once or more and return its recording; `nbytes` is what the pool grew by."""
        ...

    def start_over(self) -> None:
        """Take a new pool, for all recordings in the last one were dropped."""
        ...


class CudaRecorder:
    """Records with CUDA or HIP graphs, all of them in one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # torch's own stream for recording is one for all devices: that of the first that recorded.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, launch: Callable[[], Tensor]) -> Recording:
        """Run the step once, so that kernels are compiled, and record it."""
        launch()
        # The stream that is current now is so again afterwards, also where recording fails.
        with _ONE_AT_A_TIME, torch.cuda.stream(torch.cuda.current_stream(self._device)):
            torch.cuda.synchronize(self._device)
            # Recording begins with this as well: what it gives back is not what the recording takes.
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved(self._device)
            graph = torch.cuda.CUDAGraph()
            # Threads of other models may reserve memory meanwhile, which "global" would take for an error.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                output = launch()
            return _CudaRecording(graph, output, max(torch.cuda.memory_reserved(self._device) - before, 0))

    def start_over(self) -> None:
        """Take a new pool; see `Record`."""
        self._pool = torch.cuda.graph_pool_handle()


@dataclass
class _CudaRecording:
    graph: torch.cuda.CUDAGraph
    output: Tensor
    nbytes: int

    def replay(self) -> None:
        self.graph.replay()


class DecodeGraphs:
    """The recordings of an executable, by bucket."""

    def __init__(
        self,
        launch: Launch,
        record: Record,
        device: torch.device,
        *,
        block_size: int,
        max_sequences: int,
        max_context: int,
        memory: int,
        sums: SplitSums,
    ) -> None:
        """Make no recording yet.

        memory: bytes that recordings may take together; none are made with 0
        sums:   memory for the sums of decode attention, which all of them use
        """
        self._launch, self._record, self._device = launch, record, device
        self._block_size, self._memory, self._sums = block_size, memory, sums
        self._sequences = sequence_buckets(max_sequences)
        self._contexts = context_buckets(max_context)
        self._recordings: dict[DecodeBucket, tuple[StepBuffer, Recording]] = {}

    def bucket_of(self, sequences: int, longest_context: int) -> DecodeBucket | None:
        """Return the least bucket that a decode step fits; None where it fits none."""
        if not self._memory or sequences > self._sequences[-1] or longest_context > self._contexts[-1]:
            return None
        count = self._sequences[bisect_left(self._sequences, sequences)]
        context = self._contexts[bisect_left(self._contexts, longest_context)]
        return DecodeBucket(count, context, self._block_size)

    def run(self, bucket: DecodeBucket, plan: StepPlan, prepare: Prepare) -> tuple[Tensor, StepInputs]:
        """Run a step that was planned for a bucket, recording it first where it is the bucket's first.

        `prepare` completes the step's inputs once they are on the device, before it runs.
        """
        found = self._recordings.get(bucket)
        if found is None:
            found = self._kept(bucket, plan)
        buffer, recording = found
        inputs = buffer.load(plan)
        prepare(inputs)
        recording.replay()
        return recording.output, inputs

    def _kept(self, bucket: DecodeBucket, plan: StepPlan) -> tuple[StepBuffer, Recording]:
        self._recordings[bucket] = self._recorded(bucket, plan)
        if len(self._recordings) > 1 and self.nbytes > self._memory:
            _LOG.info("%d recordings take %.1f MB and are dropped", len(self), self.nbytes / 1e6)
            self._recordings.clear()
            self._record.start_over()
            self._recordings[bucket] = self._recorded(bucket, plan)
        return self._recordings[bucket]

    def _recorded(self, bucket: DecodeBucket, plan: StepPlan) -> tuple[StepBuffer, Recording]:
        buffer = StepBuffer(bucket.shape, self._device, tile_rows=1, sums=self._sums)
        inputs = buffer.load(plan)  # real numbers, for recording runs the step as well
        launch = self._launch
        recording = self._record(lambda: launch(inputs))
        _LOG.info(
            "recorded decoding of %d sequences up to %d tokens: %.1f MB",
            bucket.sequences, bucket.context, recording.nbytes / 1e6,
        )  # fmt: skip
        return buffer, recording

    @property
    def nbytes(self) -> int:
        """Memory that the recordings take."""
        return sum(buffer.capacity + recording.nbytes for buffer, recording in self._recordings.values())

    def __len__(self) -> int:
        return len(self._recordings)


def sequence_buckets(most: int) -> list[int]:
    """Return the numbers of sequences that steps are filled up to: powers of two to 8, multiples of 8, then of 16."""
    sizes = [*(1, 2, 4), *range(8, 64, 8), *range(64, 257, 16), *range(288, 1025, 32)]
    return [size for size in sizes if size < most] + [most]


def context_buckets(longest: int) -> list[int]:
    """Return the contexts that recordings are made for: programs beyond a sequence's own end at once, but start."""
    sizes = []
    size = _SHORTEST_CONTEXT
    while size < longest:
        sizes.append(size)
        size *= _CONTEXT_GROWTH
    return [*sizes, longest]

"""All ranks of a bundle as threads of one process, and the communicator that joins them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from inferencex.formats.bundle import Bundle
from inferencex.runtime.backends.base import BackendOptions, Executable, Float32Array, ModelFacts, StepBatch
from inferencex.runtime.backends.cpu import CpuBackend
from inferencex.runtime.parallel.bundle_shard import BundleShard
from inferencex.runtime.parallel.communicator import Communicator
from inferencex.runtime.parallel.plan import plan_graph
from inferencex.runtime.parallel.roles import PlanOptions
from inferencex.runtime.parallel.shard import cut_graph

T = TypeVar("T")

EVERYTHING = PlanOptions(least_bytes=1, embedding_bytes=1)
"""Divide whatever can be, however small."""


class Meeting:
    """Where the ranks of one process lay down what they have.

    turn: held by the one rank that computes; Triton's interpreter serves one thread at a time
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.turn = threading.Lock()
        self.arrays: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def exchange(self, rank: int, array: Any) -> list[Any]:
        """Return what all ranks brought; the copies are each rank's own."""
        self.turn.release()
        try:
            self.barrier.wait()
            self.arrays[rank] = np.array(array)
            self.barrier.wait()
            return list(self.arrays)
        finally:
            self.turn.acquire()


class ThreadCommunicator:
    """One rank's end; see `Communicator`."""

    can_be_recorded = False
    keeps_store = False

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank, self.size = rank, meeting.size

    def all_reduce(self, array: Any) -> None:
        array[...] = sum(self._meeting.exchange(self.rank, array))

    def all_gather(self, part: Any, whole: Any, sizes: list[int]) -> None:
        whole[...] = np.concatenate(self._meeting.exchange(self.rank, part), axis=1)

    def abort(self) -> None:
        self._meeting.barrier.abort()


class Ranks:
    """An executable whose ranks are threads; see `HiddenStatesExecutable`.

    backend: of all ranks
    joined:  what makes a rank's communicator of one of arrays
    """

    def __init__(
        self,
        bundle: Path,
        size: int,
        options: BackendOptions,
        plan_options: PlanOptions = EVERYTHING,
        backend: Any = None,
        joined: Callable[[ThreadCommunicator], Communicator] = lambda arrays: arrays,
    ) -> None:
        self._opened = Bundle.open(bundle)
        self.plan = plan_graph(self._opened.graph, size, plan_options)
        self.shards = [BundleShard(self._opened, cut_graph(self.plan, rank)) for rank in range(size)]
        self._meeting = meeting = Meeting(size)
        self.executables: list[Any] = [
            (backend or CpuBackend()).compile_shard(shard, options, joined(ThreadCommunicator(meeting, rank)))
            for rank, shard in enumerate(self.shards)
        ]
        first: Executable = self.executables[0]
        self.facts: ModelFacts = first.facts
        self.num_blocks, self.block_size = first.num_blocks, first.block_size

    def step(self, batch: StepBatch) -> Float32Array:
        return self._all([executable.step for executable in self.executables], batch)

    def hidden_states(self, batch: StepBatch) -> Float32Array:
        return self._all([executable.hidden_states for executable in self.executables], batch)

    def _all(self, steps: Sequence[Callable[[StepBatch], Float32Array]], batch: StepBatch) -> Float32Array:
        """Run one function of each rank; all of them have to return the same."""
        results: list[Float32Array | BaseException | None] = [None] * len(steps)

        def run(rank: int) -> None:
            try:
                with self._meeting.turn:
                    results[rank] = steps[rank](batch)
            except BaseException as error:
                results[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(steps))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException):
                raise result
            assert result is not None and results[0] is not None
            np.testing.assert_array_equal(result, results[0])
        assert isinstance(results[0], np.ndarray)
        return results[0]

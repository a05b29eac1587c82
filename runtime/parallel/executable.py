"""All ranks as one executable: the engine's process is the first of them, and tells the others what to do."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import FrameType

import numpy as np
from numpy.typing import NDArray

from inferencex.formats.errors import BackendError
from inferencex.runtime.aside import Aside
from inferencex.runtime.backends.base import (
    Executable,
    Float32Array,
    HiddenStatesExecutable,
    ProfiledExecutable,
    StepBatch,
)
from inferencex.runtime.parallel.communicator import Communicator
from inferencex.runtime.parallel.wire import Message
from inferencex.runtime.parallel.workers import Workers

_REFUSAL_PATIENCE = 10.0
_REASON_PATIENCE = 5.0
_INSISTENT = 3
"""Interrupts within one step after which it is not waited for any more."""

_LOOK = 0.25
"""Seconds after which the main thread looks for interrupts: one that comes as it begins to wait does not wake it."""

_ARRAYS = tuple(entry.name for entry in fields(StepBatch))


class ParallelExecutable:
    """Runs every step on all ranks; see `Executable`. Steps take turns when several threads call.

    Logits always come to this process, which chooses the tokens: it is no `SamplingExecutable`, whatever the first is.

    first:           the rank of this process
    communicator:    its end of the exchanges
    store:           the folder by which ranks found each other, which is removed when they end, if it is still there
    bytes_per_token: of layer state, of all ranks together
    hidden_size:     only there when the first rank has it, which makes this a `HiddenStatesExecutable`
    """

    hidden_size: int

    def __init__(
        self, first: Executable, workers: Workers, communicator: Communicator, bytes_per_token: int, store: Path
    ) -> None:
        self.facts = replace(first.facts, bytes_per_token=bytes_per_token)
        self.num_blocks, self.block_size = first.num_blocks, first.block_size
        self._first, self._workers = first, workers
        self._lock = threading.Lock()
        if isinstance(first, HiddenStatesExecutable):
            self.hidden_size = first.hidden_size
        self._finalizer = weakref.finalize(self, _end, os.getpid(), workers, communicator, store)

    @property
    def process_ids(self) -> list[int]:
        """The processes of the other ranks."""
        return list(self._workers.process_ids)

    @property
    def failure(self) -> str | None:
        """Which rank has failed, and why; None as long as all are there. See `LosableExecutable`."""
        return self._workers.failure

    def abandon(self, reason: str) -> None:
        """End the other ranks, also within a step, which then fails; any thread may call it."""
        self._workers.fail(reason)

    def close(self) -> None:
        """End the other ranks; steps raise BackendError from now on."""
        with self._lock:
            self._workers.failure = self._workers.failure or "the model was closed; load the bundle again"
            self._finalizer()

    def step(self, batch: StepBatch) -> Float32Array:
        """Run one step; the logits are valid until the next one.

        Raises BackendError for a batch that cannot be, and, naming the rank and its reason, when a rank has failed:
        then, and ever after.
        """
        return self._run(Message("step", {}, _arrays(batch)), lambda: self._first.step(batch))

    def hidden_states(self, batch: StepBatch) -> Float32Array:
        """Run one step up to the head; see `HiddenStatesExecutable`."""
        first = self._first
        if not isinstance(first, HiddenStatesExecutable):
            raise BackendError("this bundle's graph does not end in a linear layer, so it has no hidden states to give")
        return self._run(Message("hidden", {}, _arrays(batch)), lambda: first.hidden_states(batch))

    def set_profiling(self, on: bool) -> None:
        """Measure every operation of the first rank from the next step on, or stop doing so."""
        self._profiled().set_profiling(on)

    def profile_lines(self) -> Iterator[str]:
        """Yield a table of what was measured; time in which the first rank waits for others is that of exchanges."""
        return self._profiled().profile_lines()

    def _profiled(self) -> ProfiledExecutable:
        if not isinstance(self._first, ProfiledExecutable):
            raise BackendError("this backend does not measure its operations")
        return self._first

    def _run(self, message: Message, own: Callable[[], Float32Array]) -> Float32Array:
        with self._lock:
            if self._workers.failure is not None:
                raise self._workers.error()
            return _uninterrupted(lambda: self._together(message, own), self._workers.fail)

    def _together(self, message: Message, own: Callable[[], Float32Array]) -> Float32Array:
        """Run a step on all ranks; when it has failed, settle whether all are in step, or one is lost."""
        try:
            self._workers.tell(message)
            result = own()
        except BackendError as error:
            # Either every rank refuses the batch, and nothing has happened, or one is lost.
            if self._workers.failure is None and self._workers.wait_for_refusals(_REFUSAL_PATIENCE):
                raise
            self._workers.wait_for_failure(_REASON_PATIENCE)
            self._workers.fail(f"the first rank has failed: {error}")
            raise self._workers.error() from error
        except RuntimeError as error:  # such as a device's, whose exchanges were aborted
            self._workers.fail(f"the first rank has failed: {type(error).__name__}: {error}")
            raise self._workers.error() from error
        except BaseException as error:
            self._workers.fail(f"the first rank has failed: {type(error).__name__}: {error}")
            raise
        if self._workers.failure is not None:  # then exchanges may have ended early, and say anything
            raise self._workers.error()
        return result


def _end(process: int, workers: Workers, communicator: Communicator, store: Path) -> None:
    if os.getpid() != process:  # a fork, which ends while the ranks go on for the process that it is one of
        return
    workers.close()
    communicator.abort()
    shutil.rmtree(store, ignore_errors=True)


def _arrays(batch: StepBatch) -> list[NDArray[np.int32]]:
    return [getattr(batch, name) for name in _ARRAYS]


def _uninterrupted(work: Callable[[], Float32Array], give_up: Callable[[str], None]) -> Float32Array:
    """Do work to its end, even where an interrupt comes, which is raised behind it: ranks have to stay in step.

    Who interrupts again and again does not want to wait, such as for a rank that was stopped: `give_up` is called then.
    Interrupts come to the main thread, so that the work is on another one there.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        return work()
    frames: list[FrameType | None] = []

    def note(number: int, frame: FrameType | None) -> None:
        frames.append(frame)
        if len(frames) == _INSISTENT:
            give_up(f"it was interrupted {_INSISTENT} times within a step")

    signal.signal(signal.SIGINT, note)
    try:
        aside = Aside(work)
        while not aside.wait(_LOOK):
            pass
    finally:
        signal.signal(signal.SIGINT, previous)
    if frames:
        previous(signal.SIGINT, frames[0])
    return aside.result()

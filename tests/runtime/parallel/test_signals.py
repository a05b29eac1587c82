"""Interrupts and other signals: ranks stay in step, and end only where somebody insists."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

from inferencex.formats.errors import BackendError
from inferencex.runtime.backends.base import Float32Array, StepBatch
from inferencex.runtime.parallel import executable as executable_module
from inferencex.runtime.parallel.executable import ParallelExecutable
from tests.runtime.parallel.endings import SOON, prompt_batch


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_a_terminal_or_a_service_manager_sends_to_all_ends_no_other_rank(
    running: ParallelExecutable, number: signal.Signals
) -> None:
    """The first rank completes its answers first."""
    for process_id in running.process_ids:
        os.kill(process_id, number)
    running.step(prompt_batch())


def test_an_interrupt_waits_for_the_step() -> None:
    """Ranks stay in step: what was interrupted is done first."""
    done = []

    def work() -> Float32Array:
        os.kill(os.getpid(), signal.SIGINT)
        done.append(True)
        return np.zeros((0, 0), np.float32)

    with pytest.raises(KeyboardInterrupt):
        executable_module._uninterrupted(work, pytest.fail)
    assert done == [True]


def test_an_interrupt_ends_no_rank(running: ParallelExecutable, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = running.step(prompt_batch()).copy()
    step = running._first.step

    def interrupted(batch: StepBatch) -> Float32Array:
        os.kill(os.getpid(), signal.SIGINT)
        return step(batch)

    with monkeypatch.context() as patch:
        patch.setattr(running._first, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            running.step(prompt_batch())
    np.testing.assert_array_equal(running.step(prompt_batch()), expected)


def test_an_interrupt_of_a_batch_that_all_refuse_harms_nothing(
    running: ParallelExecutable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusals are settled: left open, they would end the ranks a moment later."""
    expected = running.step(prompt_batch()).copy()
    step = running._first.step

    def interrupted(batch: StepBatch) -> Float32Array:
        os.kill(os.getpid(), signal.SIGINT)
        return step(batch)

    with monkeypatch.context() as patch:
        patch.setattr(running._first, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            running.step(prompt_batch(65))
    assert not running._workers._refusals
    np.testing.assert_array_equal(running.step(prompt_batch()), expected)


def test_an_interrupt_hides_no_failure_of_the_first_rank(
    compiled: ParallelExecutable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others run a step then that the first one has not completed."""

    def broken(batch: StepBatch) -> Float32Array:
        os.kill(os.getpid(), signal.SIGINT)
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(compiled._first, "step", broken)
    with pytest.raises(KeyboardInterrupt):
        compiled.step(prompt_batch())
    assert compiled.failure == "the first rank has failed: RuntimeError: an illegal memory access was encountered"


def test_an_interrupt_while_ranks_are_told_waits_until_all_are(
    running: ParallelExecutable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that was told a step which the first one does not run would be a step ahead of it ever after."""
    expected = running.step(prompt_batch()).copy()
    tell = running._workers.tell

    def interrupted(message: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        tell(message)

    with monkeypatch.context() as patch:
        patch.setattr(running._workers, "tell", interrupted)
        with pytest.raises(KeyboardInterrupt):
            running.step(prompt_batch(2))
    np.testing.assert_array_equal(running.step(prompt_batch()), expected)


def test_whoever_interrupts_again_and_again_does_not_wait(
    compiled: ParallelExecutable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as for a rank that was stopped: the others would wait for minutes."""
    os.kill(compiled.process_ids[0], signal.SIGSTOP)
    step = compiled._first.step

    def interrupted(batch: StepBatch) -> Float32Array:
        for count in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            assert noted[count].wait(SOON)
        return step(batch)

    noted = [threading.Event() for _ in range(3)]
    pending = iter(noted)
    set_handler = signal.signal

    def observed(number: int, handler: Any) -> Any:
        if not callable(handler) or handler is signal.default_int_handler:
            return set_handler(number, handler)

        def handle(number: int, frame: Any) -> None:
            handler(number, frame)
            next(pending).set()

        return set_handler(number, handle)

    monkeypatch.setattr(signal, "signal", observed)
    monkeypatch.setattr(compiled._first, "step", interrupted)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        compiled.step(prompt_batch())
    assert time.monotonic() - begin < SOON
    with pytest.raises(BackendError, match="interrupted 3 times within a step"):
        compiled.step(prompt_batch())

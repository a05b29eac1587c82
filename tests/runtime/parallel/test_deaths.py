"""Ranks that die, fail or hold something else are named within seconds, and nobody is left."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferencex.formats.errors import BackendError
from inferencex.runtime.backends.base import Float32Array, StepBatch
from inferencex.runtime.backends.cpu import CpuBackend
from inferencex.runtime.parallel import backend as backend_module
from inferencex.runtime.parallel import executable as executable_module
from inferencex.runtime.parallel import gloo as gloo_module
from inferencex.runtime.parallel.backend import ParallelBackend
from inferencex.runtime.parallel.communicator import LostRankError
from inferencex.runtime.parallel.executable import ParallelExecutable
from inferencex.runtime.parallel.gloo import GlooCommunicator
from inferencex.runtime.parallel.wire import Message
from inferencex.runtime.parallel.workers import Workers
from tests.runtime.parallel.conftest import OPTIONS, THREE, MakeBundle
from tests.runtime.parallel.endings import SOON, assert_failed, ends, prompt_batch
from tests.runtime.parallel.ranks import EVERYTHING


def test_a_rank_that_was_killed_is_named(compiled: ParallelExecutable) -> None:
    os.kill(compiled.process_ids[0], signal.SIGKILL)
    assert_failed(compiled, r"rank 1 \(process \d+\) has failed: it was ended by SIGKILL, as the system does")


def test_a_rank_that_is_killed_within_a_step_is_named(make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first rank is about to wait for it, and so is the third."""
    executable = ParallelBackend(CpuBackend(), 3, EVERYTHING).compile(make_bundle("llama", **THREE), OPTIONS)
    first, process_ids = executable._first, executable.process_ids
    step = first.step

    def kill_and_step(batch: StepBatch) -> Float32Array:
        os.kill(process_ids[1], signal.SIGKILL)
        return step(batch)

    monkeypatch.setattr(first, "step", kill_and_step)
    assert_failed(executable, r"rank 2 \(process \d+\) has failed: it was ended by SIGKILL")
    assert all(ends(process_id) for process_id in process_ids)


def test_exchanges_are_aborted_and_what_they_leave_is_not_returned(
    make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is on devices, where nothing but an abort ends an exchange with a rank that has died."""
    aborted = threading.Event()
    monkeypatch.setattr(GlooCommunicator, "abort", lambda communicator: aborted.set())
    executable = ParallelBackend(CpuBackend(), 2, EVERYTHING).compile(make_bundle("llama"), OPTIONS)

    def wait_for_another(batch: StepBatch) -> Float32Array:
        os.kill(executable.process_ids[0], signal.SIGKILL)
        assert aborted.wait(SOON)
        return np.zeros((1, 1), np.float32)

    monkeypatch.setattr(executable._first, "step", wait_for_another)
    assert_failed(executable, r"rank 1 \(process \d+\) has failed: it was ended by SIGKILL")


def test_a_rank_that_dies_while_all_load_is_named(make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: list[Workers] = []

    class Watched(Workers):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            ranks.append(self)

    def lose(*arguments: Any) -> None:
        os.kill(ranks[0].process_ids[0], signal.SIGKILL)
        raise LostRankError("rank 0 has lost another rank")

    monkeypatch.setattr(backend_module, "Workers", Watched)
    monkeypatch.setattr(CpuBackend, "compile_shard", lose)
    with pytest.raises(BackendError, match=r"rank 1 \(process \d+\) has failed: it was ended by SIGKILL"):
        ParallelBackend(CpuBackend(), 2, EVERYTHING).compile(make_bundle("llama"), OPTIONS)


def test_a_first_rank_that_cannot_load_leaves_no_exchange_behind(
    make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On devices what is left of one would wait for the others, which are ended."""
    aborted = threading.Event()

    def fail(*arguments: Any) -> None:
        raise BackendError("not enough memory")

    monkeypatch.setattr(GlooCommunicator, "abort", lambda communicator: aborted.set())
    monkeypatch.setattr(CpuBackend, "compile_shard", fail)
    with pytest.raises(BackendError, match=r"^not enough memory$"):
        ParallelBackend(CpuBackend(), 2, EVERYTHING).compile(make_bundle("llama"), OPTIONS)
    assert aborted.is_set()


def test_a_rank_that_dies_while_all_connect_is_named(make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within seconds, and not when the first rank's patience ends, which waits for it inside of torch."""
    ranks: list[Workers] = []
    tell, connect = Workers.tell, CpuBackend.connect

    def stop_and_tell(workers: Workers, messages: Any) -> None:
        if isinstance(messages, Message) and messages.kind == "compile":
            ranks.append(workers)
            os.kill(workers.process_ids[0], signal.SIGSTOP)
        tell(workers, messages)

    def kill_and_connect(backend: CpuBackend, *arguments: Any) -> GlooCommunicator:
        os.kill(ranks[0].process_ids[0], signal.SIGKILL)
        return connect(backend, *arguments)  # type: ignore[return-value]

    monkeypatch.setattr(Workers, "tell", stop_and_tell)
    monkeypatch.setattr(CpuBackend, "connect", kill_and_connect)
    monkeypatch.setattr(gloo_module, "PATIENCE", 3 * SOON)
    begin = time.monotonic()
    with pytest.raises(BackendError, match=r"rank 1 \(process \d+\) has failed: it was ended by SIGKILL"):
        ParallelBackend(CpuBackend(), 2, EVERYTHING).compile(make_bundle("llama"), OPTIONS)
    assert time.monotonic() - begin < 2 * SOON


def test_a_stopped_rank_that_takes_no_messages_counts_as_lost(
    compiled: ParallelExecutable, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = compiled._workers._workers[0]
    worker.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 0, 1000))
    monkeypatch.setattr(compiled._first, "step", lambda batch: np.zeros((1, 1), np.float32))
    os.kill(worker.process.pid, signal.SIGSTOP)
    with pytest.raises(BackendError, match=r"rank 1 \(process \d+\) has taken no message for"):
        for _ in range(1 << 16):
            compiled.step(prompt_batch())
    assert all(ends(process_id) for process_id in compiled.process_ids)


def test_a_rank_that_has_an_error_says_what_it_is(compiled: ParallelExecutable) -> None:
    compiled._workers.tell(Message("step", {}, []))
    assert_failed(compiled, r"rank 1 \(process \d+\) has failed: TypeError: ")


def test_a_rank_that_refuses_alone_is_an_error(compiled: ParallelExecutable) -> None:
    """The first rank then waits for it, and must not wait for long."""
    too_long = prompt_batch(65)
    compiled._workers.tell(Message("step", {}, [getattr(too_long, name) for name in executable_module._ARRAYS]))
    # The worker refuses that, and then runs the step below in turn; the first rank has refused nothing.
    assert compiled._workers.wait_for_failure(SOON)
    assert_failed(compiled, "rank 1 has refused a step that the first rank runs: a sequence of 65 tokens")


_DIES = """
import os, signal, sys
from pathlib import Path
from inferencex.runtime.backends.base import BackendOptions
from inferencex.runtime.backends.cpu import CpuBackend
from inferencex.runtime.parallel.backend import ParallelBackend
executable = ParallelBackend(CpuBackend(), 2).compile(Path(sys.argv[1]), BackendOptions(num_blocks=8, threads=1))
print(*executable.process_ids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_others_end_when_the_first_dies(make_bundle: MakeBundle) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _DIES, str(make_bundle("llama"))], stdout=subprocess.PIPE, text=True, timeout=120
    )
    assert run.returncode == -signal.SIGKILL
    assert all(ends(int(process_id)) for process_id in run.stdout.split())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("plan", "rank 1 has another plan of who computes what"),
        ("bundle", "rank 1 has other tensors, or the same ones of another bundle"),
    ],
)
def test_a_rank_that_holds_something_else_is_named(
    make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch, change: str, message: str
) -> None:
    settings_of = ParallelBackend._settings

    def settings(self: ParallelBackend, *arguments: Any) -> dict[str, Any]:
        found = settings_of(self, *arguments)
        if change == "plan":
            return {**found, "plan": {"least_bytes": 1 << 30, "embedding_bytes": 1 << 30}}
        return {**found, "bundle": str(make_bundle("llama", max_position_embeddings=256))}

    monkeypatch.setattr(ParallelBackend, "_settings", settings)
    with pytest.raises(BackendError, match=message):
        ParallelBackend(CpuBackend(), 2, EVERYTHING).compile(make_bundle("llama"), OPTIONS)


def test_a_rank_that_cannot_load_says_why(
    make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings_of = ParallelBackend._settings
    monkeypatch.setattr(
        ParallelBackend,
        "_settings",
        lambda self, *arguments: {**settings_of(self, *arguments), "bundle": str(tmp_path)},
    )
    with pytest.raises(BackendError, match=r"rank 1 \(process \d+\) has failed: .*holds no bundle.json"):
        ParallelBackend(CpuBackend(), 2, EVERYTHING).compile(make_bundle("llama"), OPTIONS)

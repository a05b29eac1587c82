"""Ranks in processes of their own: they compute what one does, and end together."""

from __future__ import annotations

import importlib.util
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferencex.formats.errors import BackendError, OptionError
from inferencex.runtime import LLM, SamplingParams
from inferencex.runtime.backends.base import Float32Array, StepBatch
from inferencex.runtime.backends.cpu import CpuBackend
from inferencex.runtime.backends.reference import ReferenceBackend
from inferencex.runtime.parallel import backend as backend_module
from inferencex.runtime.parallel import executable as executable_module
from inferencex.runtime.parallel import gloo as gloo_module
from inferencex.runtime.parallel.backend import ParallelBackend
from inferencex.runtime.parallel.communicator import LostRankError
from inferencex.runtime.parallel.executable import ParallelExecutable
from inferencex.runtime.parallel.gloo import GlooCommunicator
from inferencex.runtime.parallel.wire import Message
from inferencex.runtime.parallel.workers import Workers
from tests.architectures.ragged import last_logits, ragged_logits, random_sequences
from tests.runtime.parallel.conftest import OPTIONS, MakeBundle
from tests.runtime.parallel.ranks import EVERYTHING

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SOON = 10.0
"""Seconds within which ranks have to notice that one has died."""

THREE = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize(
    ("name", "size", "overrides"),
    [("llama", 2, {}), ("llama", 3, THREE), ("mixtral", 2, {})],
    ids=lambda value: str(value),
)
def test_answers_are_those_of_one_process(
    make_bundle: MakeBundle, name: str, size: int, overrides: dict[str, Any]
) -> None:
    """In pieces of prompts, with beginnings of prompts in the cache."""
    bundle = make_bundle(name, **overrides)
    beginning = random_sequences(250, [19], seed=3)[0]
    prompts = [*random_sequences(250, [5, 30, 17]), [*beginning, 1, 2], [*beginning, 3]]
    settings: dict[str, Any] = {"num_kv_blocks": 32, "block_size": 4, "max_num_batched_tokens": 16, "threads": size}
    with LLM(bundle, backend=CpuBackend(), **settings) as alone:
        expected = answers(alone, prompts)
    with LLM(bundle, backend=ParallelBackend(CpuBackend(), size, EVERYTHING), **settings) as together:
        assert answers(together, prompts) == expected
        assert answers(together, prompts[::-1]) == expected[::-1]
        assert together.generate(prompts[1], GREEDY)[0].num_cached_tokens > 0
        together.engine.check_integrity()


def test_logits_and_hidden_states_are_those_of_one_process(
    make_bundle: MakeBundle, running: ParallelExecutable
) -> None:
    alone = CpuBackend().compile(make_bundle("llama"), OPTIONS)
    sequences = random_sequences(250)
    for ours, theirs in zip(ragged_logits(running, sequences), ragged_logits(alone, sequences), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    hidden = [_hidden(executable) for executable in (running, alone)]
    assert hidden[0].shape == (1, running.hidden_size)
    np.testing.assert_allclose(hidden[0], hidden[1], atol=1e-4)


def _hidden(executable: Any) -> Float32Array:
    return executable.hidden_states(_batch()).copy()  # type: ignore[no-any-return]


def _batch(tokens: int = 3) -> StepBatch:
    blocks = -(-tokens // OPTIONS.block_size)
    return StepBatch(
        token_ids=np.arange(tokens, dtype=np.int32),
        positions=np.arange(tokens, dtype=np.int32),
        sequence_offsets=np.array([0, tokens], np.int32),
        context_lengths=np.array([tokens], np.int32),
        block_tables=np.arange(blocks, dtype=np.int32)[None],
        logit_rows=np.array([tokens - 1], np.int32),
        prompt_lengths=np.full(tokens, tokens, np.int32),
    )


def test_a_batch_that_all_refuse_harms_nothing(running: ParallelExecutable) -> None:
    expected = running.step(_batch()).copy()
    with pytest.raises(BackendError, match="longer than max_model_len"):
        running.step(_batch(65))
    np.testing.assert_array_equal(running.step(_batch()), expected)


def test_one_logit_row_and_none(running: ParallelExecutable) -> None:
    assert last_logits(running, random_sequences(250)[-1]).shape == (1, running.facts.vocab_size)


def test_a_rank_that_was_killed_is_named(compiled: ParallelExecutable) -> None:
    os.kill(compiled.process_ids[0], signal.SIGKILL)
    _assert_failed(compiled, r"rank 1 \(process \d+\) has failed: it was ended by SIGKILL, as the system does")


def test_a_rank_that_is_killed_within_a_step_is_named(make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first rank is about to wait for it, and so is the third."""
    executable = ParallelBackend(CpuBackend(), 3, EVERYTHING).compile(make_bundle("llama", **THREE), OPTIONS)
    first, process_ids = executable._first, executable.process_ids
    step = first.step

    def kill_and_step(batch: StepBatch) -> Float32Array:
        os.kill(process_ids[1], signal.SIGKILL)
        return step(batch)

    monkeypatch.setattr(first, "step", kill_and_step)
    _assert_failed(executable, r"rank 2 \(process \d+\) has failed: it was ended by SIGKILL")
    assert all(_ends(process_id) for process_id in process_ids)


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
    _assert_failed(executable, r"rank 1 \(process \d+\) has failed: it was ended by SIGKILL")


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_a_terminal_or_a_service_manager_sends_to_all_ends_no_other_rank(
    running: ParallelExecutable, number: signal.Signals
) -> None:
    """The first rank completes its answers first."""
    for process_id in running.process_ids:
        os.kill(process_id, number)
    running.step(_batch())


def test_a_stopped_rank_that_takes_no_messages_counts_as_lost(
    compiled: ParallelExecutable, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = compiled._workers._workers[0]
    worker.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 0, 1000))
    monkeypatch.setattr(compiled._first, "step", lambda batch: np.zeros((1, 1), np.float32))
    os.kill(worker.process.pid, signal.SIGSTOP)
    with pytest.raises(BackendError, match=r"rank 1 \(process \d+\) has taken no message for"):
        for _ in range(1 << 16):
            compiled.step(_batch())
    assert all(_ends(process_id) for process_id in compiled.process_ids)


def test_a_fork_that_ends_leaves_the_ranks_alone(running: ParallelExecutable) -> None:
    """Also one that runs what is to be done at exit, as `multiprocessing` and `os.fork` in a script do."""
    ended = running._finalizer
    child = os.fork()
    if child == 0:
        try:
            ended()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    running.step(_batch())
    assert running._finalizer.alive


def test_a_refusal_that_was_settled_ends_nothing_later(running: ParallelExecutable) -> None:
    """Its timer must not take the next one's, which is not settled yet, for its own."""
    workers = running._workers
    settled, open_ = Message("refused", {"error": "one"}), Message("refused", {"error": "another"})
    workers._refusals.append(open_)
    workers._end_if_alone(workers._workers[0], settled)
    workers._refusals.clear()
    assert workers.failure is None
    running.step(_batch())


def test_a_rank_that_has_an_error_says_what_it_is(compiled: ParallelExecutable) -> None:
    compiled._workers.tell(Message("step", {}, []))
    _assert_failed(compiled, r"rank 1 \(process \d+\) has failed: TypeError: ")


def test_a_rank_that_refuses_alone_is_an_error(compiled: ParallelExecutable) -> None:
    """The first rank then waits for it, and must not wait for long."""
    too_long = _batch(65)
    compiled._workers.tell(Message("step", {}, [getattr(too_long, name) for name in executable_module._ARRAYS]))
    # The worker refuses that, and then runs the step below in turn; the first rank has refused nothing.
    assert compiled._workers.wait_for_failure(SOON)
    _assert_failed(compiled, "rank 1 has refused a step that the first rank runs: a sequence of 65 tokens")


def _assert_failed(executable: ParallelExecutable, message: str) -> None:
    """A step fails within seconds, and so does every later one; nobody is left."""
    begin = time.monotonic()
    for _ in range(2):
        with pytest.raises(BackendError, match=message):
            executable.step(_batch())
    assert time.monotonic() - begin < SOON
    assert all(_ends(process_id) for process_id in executable.process_ids)
    executable.close()


def _ends(process_id: int) -> bool:
    """Wait for the end of a process, whoever's child it is."""
    try:
        handle = os.pidfd_open(process_id)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], SOON)[0])
    finally:
        os.close(handle)


def test_closing_ends_the_others(make_bundle: MakeBundle) -> None:
    llm = LLM(make_bundle("llama"), backend=ParallelBackend(CpuBackend(), 2, EVERYTHING), num_kv_blocks=8)
    executable = llm.engine.executable
    assert isinstance(executable, ParallelExecutable)
    llm.close()
    assert all(_ends(process_id) for process_id in executable.process_ids)
    with pytest.raises(BackendError, match="was closed"):
        executable.step(_batch())


def test_dropping_it_ends_the_others(make_bundle: MakeBundle) -> None:
    executable = ParallelBackend(CpuBackend(), 2, EVERYTHING).compile(make_bundle("llama"), OPTIONS)
    process_ids = executable.process_ids
    del executable
    assert all(_ends(process_id) for process_id in process_ids)


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
    assert all(_ends(int(process_id)) for process_id in run.stdout.split())


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


def test_nothing_is_left_on_disk_while_ranks_run(
    make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Who is killed removes nothing."""
    bundle = make_bundle("llama")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    executable = ParallelBackend(CpuBackend(), 2, EVERYTHING).compile(bundle, OPTIONS)
    assert list(tmp_path.iterdir()) == []
    assert executable.step(_batch()).shape == (1, executable.facts.vocab_size)
    executable.close()


def test_a_folder_that_cannot_be_made_is_named(
    make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bundle = make_bundle("llama")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    monkeypatch.setattr(backend_module, "Workers", _unexpected)
    with pytest.raises(BackendError, match="set TMPDIR to a folder"):
        ParallelBackend(CpuBackend(), 2, EVERYTHING).compile(bundle, OPTIONS)


def test_a_torch_that_cannot_be_loaded_is_named(make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise OSError("libtorch_cpu.so: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(BackendError, match=r"'torch', which cannot be loaded: OSError: libtorch.*\[parallel\] anew"):
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


def test_an_interrupt_waits_for_the_step() -> None:
    """Ranks stay in step: what was interrupted is done first."""
    done = []

    def work() -> Float32Array:
        os.kill(os.getpid(), signal.SIGINT)
        done.append(True)
        return np.zeros((0, 0), np.float32)

    with pytest.raises(KeyboardInterrupt):
        executable_module._uninterrupted(work, _unexpected)
    assert done == [True]


def test_an_interrupt_ends_no_rank(running: ParallelExecutable, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = running.step(_batch()).copy()
    step = running._first.step

    def interrupted(batch: StepBatch) -> Float32Array:
        os.kill(os.getpid(), signal.SIGINT)
        return step(batch)

    with monkeypatch.context() as patch:
        patch.setattr(running._first, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            running.step(_batch())
    np.testing.assert_array_equal(running.step(_batch()), expected)


def test_an_interrupt_of_a_batch_that_all_refuse_harms_nothing(
    running: ParallelExecutable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusals are settled: left open, they would end the ranks a moment later."""
    expected = running.step(_batch()).copy()
    step = running._first.step

    def interrupted(batch: StepBatch) -> Float32Array:
        os.kill(os.getpid(), signal.SIGINT)
        return step(batch)

    with monkeypatch.context() as patch:
        patch.setattr(running._first, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            running.step(_batch(65))
    assert not running._workers._refusals
    np.testing.assert_array_equal(running.step(_batch()), expected)


def test_an_interrupt_hides_no_failure_of_the_first_rank(
    compiled: ParallelExecutable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others run a step then that the first one has not completed."""

    def broken(batch: StepBatch) -> Float32Array:
        os.kill(os.getpid(), signal.SIGINT)
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(compiled._first, "step", broken)
    with pytest.raises(KeyboardInterrupt):
        compiled.step(_batch())
    assert compiled.failure == "the first rank has failed: RuntimeError: an illegal memory access was encountered"


def test_an_interrupt_while_ranks_are_told_waits_until_all_are(
    running: ParallelExecutable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that was told a step which the first one does not run would be a step ahead of it ever after."""
    expected = running.step(_batch()).copy()
    tell = running._workers.tell

    def interrupted(message: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        tell(message)

    with monkeypatch.context() as patch:
        patch.setattr(running._workers, "tell", interrupted)
        with pytest.raises(KeyboardInterrupt):
            running.step(_batch(2))
    np.testing.assert_array_equal(running.step(_batch()), expected)


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
        compiled.step(_batch())
    assert time.monotonic() - begin < SOON
    with pytest.raises(BackendError, match="interrupted 3 times within a step"):
        compiled.step(_batch())


def test_needs_are_those_of_all_ranks(make_bundle: MakeBundle) -> None:
    bundle = make_bundle("llama")
    options = replace(OPTIONS, kv_cache_memory=1 << 20)
    alone, together = (
        b.memory_needs(bundle, options) for b in (CpuBackend(), ParallelBackend(CpuBackend(), 2, EVERYTHING))
    )
    assert alone.weights < together.weights < 1.1 * alone.weights  # norms and tables of angles are on both
    assert together.state == alone.state


def test_without_torch_the_extra_is_named(make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"install inferencex\[parallel\]"):
        LLM(make_bundle("llama"), backend=CpuBackend(), tensor_parallel_size=2)


@pytest.mark.parametrize("size", [0, -1, 2.0, True, None])
def test_a_size_that_is_none_is_refused(make_bundle: MakeBundle, size: Any) -> None:
    with pytest.raises(OptionError, match="tensor_parallel_size"):
        LLM(make_bundle("llama"), backend=CpuBackend(), tensor_parallel_size=size)


def test_a_backend_that_does_not_divide_is_refused(make_bundle: MakeBundle) -> None:
    with pytest.raises(
        OptionError, match="the backend 'reference' does not divide models; use the backend cpu or triton"
    ):
        LLM(make_bundle("llama"), backend=ReferenceBackend(), tensor_parallel_size=2)


def test_a_size_that_does_not_divide_is_refused_before_anything_starts(
    make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_module, "Workers", _unexpected)
    with pytest.raises(OptionError, match=r"4 query heads and 2 key-value heads, .* possible sizes are 1, 2, 4$"):
        ParallelBackend(CpuBackend(), 3, EVERYTHING).compile(make_bundle("llama"), OPTIONS)


_unexpected: Callable[..., Any] = lambda *arguments: pytest.fail("processes were started")  # noqa: E731

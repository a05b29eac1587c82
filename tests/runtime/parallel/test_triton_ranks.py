"""Ranks of the Triton backend: what one computes, on devices of their own, and recorded only where that is possible."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from inferencex.formats.bundle import Bundle
from inferencex.formats.errors import BackendError, OptionError
from inferencex.runtime import LLM, SamplingParams
from inferencex.runtime.backends.base import SamplingExecutable, StepBatch
from inferencex.runtime.backends.cpu import CpuBackend
from inferencex.runtime.backends.device_names import DeviceName, kernels_are_interpreted
from inferencex.runtime.backends.triton import TritonBackend, devices
from inferencex.runtime.backends.triton.agreement import AgreeingRecorder
from inferencex.runtime.backends.triton.devices import Device, devices_of_ranks
from inferencex.runtime.parallel import backend as backend_module
from inferencex.runtime.parallel.backend import ParallelBackend
from inferencex.runtime.parallel.communicator import Unconnected
from inferencex.runtime.parallel.nccl import NcclCommunicator
from inferencex.runtime.parallel.through_host import ThroughHost
from tests.runtime.parallel.conftest import OPTIONS, MakeBundle
from tests.runtime.parallel.ranks import EVERYTHING, Meeting, Ranks, ThreadCommunicator

interpreted = pytest.mark.skipif(not kernels_are_interpreted(), reason="runs in Triton's interpreter")
FLOAT = replace(OPTIONS, activation_dtype="float32", kv_cache_dtype="float32")
CPU = torch.device("cpu")


def batch(first: int, end: int) -> StepBatch:
    """Two sequences of the same length, of which tokens `first` to `end` are new."""
    count = end - first
    return StepBatch(
        token_ids=np.arange(first, end, dtype=np.int32).repeat(2) * 7 % 250,
        positions=np.tile(np.arange(first, end, dtype=np.int32), 2),
        sequence_offsets=np.array([0, count, 2 * count], np.int32),
        context_lengths=np.full(2, end, np.int32),
        block_tables=np.arange(6, dtype=np.int32).reshape(2, 3),
        logit_rows=np.array([count - 1, 2 * count - 1], np.int32),
        prompt_lengths=np.full(2 * count, 5, np.int32),
    )


@interpreted
@pytest.mark.parametrize(
    ("name", "quantization", "overrides"),
    [
        ("llama", "none", {}),
        ("llama", "rtn-int4-g16", {"intermediate_size": 128}),
        ("mixtral", "none", {"intermediate_size": 97}),
        ("gpt_oss", "mxfp4", {"intermediate_size": 128}),
    ],
    ids=["dense", "int4", "expert by expert", "experts by width"],
)
def test_two_ranks_compute_what_one_does(
    make_bundle: MakeBundle, name: str, quantization: str, overrides: dict[str, Any]
) -> None:
    bundle = make_bundle(name, quantization, **overrides)
    alone = CpuBackend().compile(bundle, FLOAT)
    ranks = Ranks(bundle, 2, FLOAT, EVERYTHING, TritonBackend(), ThroughHost)
    for step in (batch(0, 5), batch(5, 6)):
        np.testing.assert_allclose(ranks.step(step), alone.step(step), atol=1e-4)
    np.testing.assert_allclose(ranks.hidden_states(batch(6, 7)), alone.hidden_states(batch(6, 7)), atol=1e-4)
    for executable in ranks.executables:
        exchanges = [one.operator for one in executable.program.instructions if one.runs_on == "exchange"]
        assert len(exchanges) > 2
        assert not executable.program.fallbacks and not executable.program.stays_on_device, "gloo is the host's"


@interpreted
def test_processes_answer_as_one_does(make_bundle: MakeBundle) -> None:
    bundle, prompts = make_bundle("llama"), [[5, 9, 200, 13, 7], [1, 2]]
    settings: dict[str, Any] = {"num_kv_blocks": 8, "block_size": 4, "threads": 2, "activation_dtype": "float32"}
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    answers = []
    for backend in (CpuBackend(), ParallelBackend(TritonBackend(), 2, EVERYTHING)):
        with LLM(bundle, backend=backend, **settings) as llm:
            answers.append([list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)])
            executable = llm.engine.executable
            assert not isinstance(executable, SamplingExecutable), "each step's logits come to the first rank"
    assert answers[0] == answers[1]


@interpreted
def test_needs_of_ranks_in_the_interpreter_are_added_up(make_bundle: MakeBundle) -> None:
    options = replace(FLOAT, kv_cache_memory=1 << 20, num_blocks=None)
    alone, together = (
        backend.memory_needs(make_bundle("llama"), options)
        for backend in (TritonBackend(), ParallelBackend(TritonBackend(), 2, EVERYTHING))
    )
    assert alone.weights < together.weights < 1.1 * alone.weights
    assert together.state == alone.state


def gpus(monkeypatch: pytest.MonkeyPatch, *dtypes: str) -> None:
    """Make the machine look as if it had GPUs that multiply these types."""
    found = [Device("cuda", index, "H200", "sm_90", 141 << 30) for index in range(len(dtypes))]
    monkeypatch.setattr(devices, "find_devices", lambda: found)
    monkeypatch.setattr(Device, "compute_dtype", property(lambda device: getattr(torch, dtypes[device.index])))


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_each_rank_has_a_gpu_and_its_share(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    gpus(monkeypatch, "bfloat16", "bfloat16", "bfloat16")
    options = replace(FLOAT, device=device, activation_dtype="auto", num_blocks=None)
    shares = [TritonBackend().rank_options(options, rank, 2) for rank in range(2)]
    assert [share.device for share in shares] == ["cuda:0", "cuda:1"]
    assert {(share.kv_cache_memory, share.activation_dtype) for share in shares} == {(None, "auto")}
    asked = TritonBackend().rank_options(replace(options, kv_cache_memory=1000), 1, 2)
    assert asked.kv_cache_memory == 500


def test_unlike_gpus_compute_in_what_both_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, "bfloat16", "float16")
    options = replace(FLOAT, activation_dtype="auto")
    assert {TritonBackend().rank_options(options, rank, 2).activation_dtype for rank in range(2)} == {"float16"}


def test_the_size_of_a_pool_is_agreed_before_or_after_it_is_measured(
    make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, "float32")
    bundle = Bundle.open(make_bundle("llama"))
    assert TritonBackend().blocks_of(bundle, FLOAT) == FLOAT.num_blocks
    assert TritonBackend().blocks_of(bundle, replace(FLOAT, num_blocks=None)) is None
    assert TritonBackend().blocks_of(bundle, replace(FLOAT, num_blocks=None, kv_cache_memory=1 << 16))


def test_too_few_gpus_are_an_error_before_anything_starts(
    make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, "bfloat16")
    monkeypatch.setattr(backend_module, "Workers", lambda size: pytest.fail("processes were started"))
    with pytest.raises(
        BackendError, match=r"tensor_parallel_size=2 takes 2 GPUs, one for each rank, and 1 can be used"
    ):
        ParallelBackend(TritonBackend(), 2, EVERYTHING).compile(make_bundle("llama"), FLOAT)
    with pytest.raises(OptionError, match=r"device='cuda:0' is one GPU, and tensor_parallel_size=2 takes one for each"):
        devices_of_ranks(DeviceName("cuda", 0), 2)


@pytest.mark.parametrize("can_be_recorded", [False, True])
def test_a_program_stays_on_the_device_where_its_exchanges_do(make_bundle: MakeBundle, can_be_recorded: bool) -> None:
    class Connected(Unconnected):
        pass

    Connected.can_be_recorded = can_be_recorded
    ranks = Ranks(make_bundle("llama"), 2, FLOAT, EVERYTHING, TritonBackend(), lambda arrays: Connected(arrays.rank, 2))
    assert [each.program.stays_on_device for each in ranks.executables] == [can_be_recorded] * 2


@dataclass
class Made:
    nbytes: int
    output: Any = None

    def replay(self) -> None: ...


class Recorder:
    """Makes recordings of a size that differs from rank to rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.pools = 1

    def __call__(self, launch: Any) -> Made:
        return Made(100_000_000_019 + self._rank)

    def start_over(self) -> None:
        self.pools += 1


def test_ranks_agree_on_what_recordings_take() -> None:
    """Or one would make a recording anew that the other replays, with other exchanges."""
    meeting, sizes = Meeting(3), [0] * 3

    def record(rank: int) -> None:
        with meeting.turn:
            recorder = AgreeingRecorder(Recorder(rank), ThroughHost(ThreadCommunicator(meeting, rank)), CPU)
            sizes[rank] = recorder(lambda: torch.zeros(1)).nbytes

    threads = [threading.Thread(target=record, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sizes == [100_000_000_021] * 3


def test_exchanges_of_narrow_floats_are_added_in_float32() -> None:
    class Alone(ThreadCommunicator):
        def all_reduce(self, array: Any) -> None:
            assert array.dtype == np.float32
            array *= 2

    alone = ThroughHost(Alone(Meeting(1), 0))
    x = torch.full((2, 3), 1.5, dtype=torch.bfloat16)
    alone.all_reduce(x)
    assert x.tolist() == [[3.0] * 3] * 2
    assert not alone.can_be_recorded


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this torch has NCCL")
def test_a_torch_without_nccl_is_named(tmp_path: Any) -> None:
    with pytest.raises(BackendError, match="is built without NCCL, by which ranks on GPUs exchange results"):
        NcclCommunicator(str(tmp_path / "store"), 0, 2, CPU)

"""Bundles on the device: as the CPU computes them, recorded or not, with tokens chosen here or there."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inferencex.formats.errors import BackendError, OptionError
from inferencex.runtime.backends.base import (
    BackendOptions,
    ClosableExecutable,
    HiddenStatesExecutable,
    SamplingExecutable,
    StepBatch,
)
from inferencex.runtime.backends.cpu import CpuBackend
from inferencex.runtime.backends.triton import TritonBackend
from inferencex.runtime.backends.triton.attention_tiles import DecodeLimits
from inferencex.runtime.backends.triton.executable import TritonExecutable
from inferencex.runtime.backends.triton.kernels import decode_attention, decode_tiles
from inferencex.runtime.backends.triton.kernels.attention_step import HeadShape
from inferencex.runtime.engine.engine import Engine
from inferencex.runtime.params import SamplingParams

OPTIONS = BackendOptions(num_blocks=24, block_size=4, max_num_seqs=4, activation_dtype="float32", threads=1)
HEADS = HeadShape(4, 2, 16, 16, torch.float32, torch.float32, "none")
"""Of the tiny bundle."""
PROMPTS = [[5, 9, 200, 13, 7], [1], [3, 3, 8]]


@dataclass
class Replayed:
    """A recording that runs its step anew: what a device replays, without one."""

    step: object
    output: Tensor
    nbytes: int = 1000
    replays: int = 0

    def replay(self) -> None:
        self.replays += 1
        self.output.copy_(self.step())  # type: ignore[operator]


class Recorder:
    def __init__(self) -> None:
        self.recordings: list[Replayed] = []
        self.pools = 1

    def start_over(self) -> None:
        self.pools += 1

    def __call__(self, step: object) -> Replayed:
        self.recordings.append(Replayed(step, step().clone()))  # type: ignore[operator]
        return self.recordings[-1]


@pytest.fixture(scope="module")
def executable(tiny_bundle: Path) -> TritonExecutable:
    return TritonBackend().compile(tiny_bundle, OPTIONS)


def prompts_batch() -> StepBatch:
    return step_batch([(0, len(prompt)) for prompt in PROMPTS], [token for prompt in PROMPTS for token in prompt])


def step_batch(chunks: list[tuple[int, int]], tokens: list[int]) -> StepBatch:
    """A step of (first, end) of each sequence, whose blocks are 6 s to 6 s + 5, with the last row's logits."""
    counts = [end - first for first, end in chunks]
    offsets = np.cumsum([0, *counts]).astype(np.int32)
    return StepBatch(
        token_ids=np.array(tokens, np.int32),
        positions=np.concatenate([np.arange(first, end) for first, end in chunks]).astype(np.int32),
        sequence_offsets=offsets,
        context_lengths=np.array([end for _, end in chunks], np.int32),
        block_tables=np.array([np.arange(6 * s, 6 * s + 6) for s in range(len(chunks))], np.int32),
        logit_rows=offsets[1:] - 1,
        prompt_lengths=np.repeat([len(prompt) for prompt in PROMPTS[: len(chunks)]], counts).astype(np.int32),
    )


def test_recorded_decoding_gives_what_launches_give(tiny_bundle: Path, executable: TritonExecutable) -> None:
    recorded, recorder = TritonBackend().compile(tiny_bundle, OPTIONS), Recorder()
    recorded.record_decoding(recorder, max_sequences=4, memory=1 << 20)
    for each in (executable, recorded):
        each.step(prompts_batch())
    assert not recorder.recordings, "prompts are not recorded"
    for place in range(3):
        batch = step_batch([(len(p) + place, len(p) + place + 1) for p in PROMPTS], [place, place + 1, 7])
        np.testing.assert_allclose(recorded.step(batch), executable.step(batch), atol=1e-5)
    assert [one.replays for one in recorder.recordings] == [3], "one bucket: 4 sequences up to the longest context"
    assert recorder.recordings[0].output.shape[0] == 4


def test_sequences_that_share_more_than_sums_are_reserved_for(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their step is launched in groups and not recorded, and gives what one launch gives."""
    monkeypatch.setattr(decode_tiles, "split_keys", lambda *shape: 32)
    groups: list[int] = []
    attend = decode_attention._attend_group

    def counted(*arguments: Any) -> None:
        groups.append(arguments[-1].stop - arguments[-1].start)
        attend(*arguments)

    monkeypatch.setattr(decode_attention, "_attend_group", counted)

    def shared(first: int, sequences: int, tokens: list[int]) -> StepBatch:
        """A step of some tokens, the same in all sequences, which have blocks 0 to 9."""
        count = len(tokens)
        offsets = np.arange(0, sequences * count + 1, count, dtype=np.int32)
        return StepBatch(
            token_ids=np.tile(np.array(tokens, np.int32), sequences),
            positions=np.tile(np.arange(first, first + count, dtype=np.int32), sequences),
            sequence_offsets=offsets,
            context_lengths=np.full(sequences, first + count, np.int32),
            block_tables=np.tile(np.arange(10, dtype=np.int32), (sequences, 1)),
            logit_rows=offsets[1:] - 1,
            prompt_lengths=np.full(sequences * count, 39, np.int32),
        )

    rows = {}
    for blocks in (12, 24):
        options = replace(OPTIONS, num_blocks=blocks, max_num_seqs=8)
        executable, recorder = TritonBackend().compile(tiny_bundle, options), Recorder()
        executable.record_decoding(recorder, max_sequences=8, memory=1 << 20)
        executable.step(shared(0, 1, list(range(2, 41))))
        groups.clear()
        rows[blocks] = executable.step(shared(39, 4, [7])).copy()
        if blocks == 12:  # of 4 tokens: 96 keys
            assert groups == [2, 2] * 2 and not recorder.recordings
            executable.step(shared(39, 2, [7]))
            with pytest.raises(BackendError, match="49 tokens is longer than a pool of 12 blocks of 4"):
                executable.step(replace(shared(39, 1, [7]), context_lengths=np.array([49], np.int32)))
        assert len(recorder.recordings) == 1
    assert np.array_equal(rows[12], rows[24]) and (rows[12] == rows[12][0]).all()


def test_recordings_beyond_their_memory_are_dropped(tiny_bundle: Path) -> None:
    executable, recorder = TritonBackend().compile(tiny_bundle, OPTIONS), Recorder()
    executable.record_decoding(recorder, max_sequences=4, memory=1500)
    executable.step(prompts_batch())
    for count, pools, made in ((1, 1, 1), (2, 2, 3), (2, 2, 3), (1, 3, 5)):
        chunks = [(len(p), len(p) + 1) for p in PROMPTS[:count]]
        executable.step(step_batch(chunks, [1] * count))
        assert (recorder.pools, len(recorder.recordings)) == (pools, made), "a second one is made again in a new pool"


def test_the_engine_is_told_tokens(tiny_bundle: Path, executable: TritonExecutable) -> None:
    assert isinstance(executable, SamplingExecutable) and isinstance(executable, HiddenStatesExecutable)
    cpu = CpuBackend().compile(tiny_bundle, OPTIONS)
    params = SamplingParams(temperature=0.0, max_tokens=6)
    seeded = SamplingParams(temperature=1.0, top_k=20, top_p=0.9, seed=3, max_tokens=6)
    outputs = []
    for each in (cpu, executable):
        engine = Engine(each)
        for index, prompt in enumerate(PROMPTS):
            engine.add_request(str(index), prompt, params if index < 2 else seeded)
        done = {}
        while engine.has_unfinished:
            done.update({d.request_id: d.output.outputs[0].token_ids for d in engine.step() if d.output is not None})
        engine.check_integrity()
        outputs.append(done)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "dropped"])
def test_weights_and_pages_are_given_back(tiny_bundle: Path, closes: bool) -> None:
    """At once, recordings or not: the next model is given what is free when it is loaded."""
    executable = TritonBackend().compile(tiny_bundle, OPTIONS)
    executable.record_decoding(Recorder(), max_sequences=4, memory=1 << 20)
    executable.step(prompts_batch())
    executable.step(step_batch([(5, 6)], [1]))
    assert isinstance(executable, ClosableExecutable)
    pages, instruction = weakref.ref(executable.pool(0)), weakref.ref(executable.program.instructions[0].run)
    gc.collect()
    gc.disable()
    try:
        if closes:
            executable.close()
            with pytest.raises(BackendError, match="was closed"):
                executable.step(prompts_batch())
        else:
            del executable
        assert pages() is None and instruction() is None
    finally:
        gc.enable()


def test_hidden_states(tiny_bundle: Path, executable: TritonExecutable) -> None:
    cpu = CpuBackend().compile(tiny_bundle, OPTIONS)
    expected = cpu.hidden_states(prompts_batch()).copy()
    assert executable.hidden_size == cpu.hidden_size
    np.testing.assert_allclose(executable.hidden_states(prompts_batch()), expected, atol=1e-4)


@pytest.mark.parametrize(("kv_cache_dtype", "tolerance"), [("float16", 5e-3), ("int8", 5e-2)])
def test_keys_and_values_of_less_precision(
    tiny_bundle: Path, executable: TritonExecutable, kv_cache_dtype: str, tolerance: float
) -> None:
    expected = executable.step(prompts_batch())
    less = TritonBackend().compile(tiny_bundle, replace(OPTIONS, kv_cache_dtype=kv_cache_dtype))
    assert less.facts.bytes_per_token < executable.facts.bytes_per_token
    np.testing.assert_allclose(less.step(prompts_batch()), expected, atol=tolerance)


def test_activations_of_16_bits(tiny_bundle: Path, executable: TritonExecutable) -> None:
    half = TritonBackend().compile(tiny_bundle, replace(OPTIONS, activation_dtype="float16"))
    expected = executable.step(prompts_batch())
    np.testing.assert_allclose(half.step(prompts_batch()), expected, atol=0.02 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": np.full(9, 10**6, np.int32)}, "token ids are 1000000 to 1000000"),
        ({"token_ids": np.full(9, -1, np.int32)}, "token ids are -1 to -1"),
        ({"block_tables": np.full((3, 6), 24, np.int32)}, "of a pool of 24"),
        ({"block_tables": np.full((3, 6), -1, np.int32)}, "block tables name blocks -1"),
        ({"block_tables": np.zeros((3, 1), np.int32)}, "needs 2 blocks"),
        ({"context_lengths": np.full(3, 10**6, np.int32)}, "longer than max_model_len"),
    ],
)
def test_batches_that_would_leave_the_pages(
    executable: TritonExecutable, change: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(BackendError, match=message):
        executable.step(replace(prompts_batch(), **change))


def test_options_that_are_none(tiny_bundle: Path) -> None:
    with pytest.raises(OptionError, match="activation_dtype='int8'"):
        TritonBackend().compile(tiny_bundle, replace(OPTIONS, activation_dtype="int8"))
    with pytest.raises(OptionError, match="kv_cache_dtype='fp8' takes scales"):
        TritonBackend().compile(tiny_bundle, replace(OPTIONS, kv_cache_dtype="fp8"))


def test_out_of_memory_says_what_to_lower(executable: TritonExecutable, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(type(executable.program), "run", fail)
    with pytest.raises(BackendError, match=r"a step of 9 tokens did not fit.*allocate.*max_num_batched_tokens"):
        executable.step(prompts_batch())


def test_memory_needs(tiny_bundle: Path, executable: TritonExecutable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_tiles, "split_keys", lambda *shape: 32)
    needs = TritonBackend().memory_needs(tiny_bundle, OPTIONS)
    assert needs.state == 24 * 4 * executable.facts.bytes_per_token
    assert needs.weights > 0 and needs.step > 0
    more = TritonBackend().memory_needs(tiny_bundle, replace(OPTIONS, max_num_seqs=8))
    limits = [DecodeLimits.of_pool(96, sequences, executable.facts.max_model_len) for sequences in (4, 8)]
    sums = [decode_tiles.most_floats(HEADS, torch.device("cpu"), limit, 64) for limit in limits]
    assert more.step - needs.step == 4 * (sums[1] - sums[0]) > 0, "sums of decode attention are part of a step"
    assert (needs.device is None) != torch.cuda.is_available()

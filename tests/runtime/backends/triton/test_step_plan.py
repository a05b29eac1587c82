"""Steps on their way to the device: every array arrives, and buckets are filled up with sequences that are none."""

from __future__ import annotations

import numpy as np
import torch

from inferencex.runtime.backends.base import Draws, StepBatch
from inferencex.runtime.backends.triton.attention_tiles import DecodeLimits
from inferencex.runtime.backends.triton.kernels.split_sums import SplitSums
from inferencex.runtime.backends.triton.step_plan import NO_SLOT, DecodeBucket, StepBuffer, is_decode, plan_step

BLOCK_SIZE = 4


def batch(chunks: list[tuple[int, int]], *, all_rows: bool = False) -> StepBatch:
    """Chunks of sequences: (first position, end). Sequence `s` has blocks 10 s, 10 s + 1, ..."""
    counts = [end - first for first, end in chunks]
    offsets = np.cumsum([0, *counts]).astype(np.int32)
    width = max(-(-end // BLOCK_SIZE) for _, end in chunks)
    tables = np.full((len(chunks), width), -1, np.int32)
    for row, (_, end) in enumerate(chunks):
        blocks = -(-end // BLOCK_SIZE)
        tables[row, :blocks] = 10 * row + np.arange(blocks)
    return StepBatch(
        token_ids=np.arange(100, 100 + offsets[-1], dtype=np.int32),
        positions=np.concatenate([np.arange(first, end) for first, end in chunks]).astype(np.int32),
        sequence_offsets=offsets,
        context_lengths=np.array([end for _, end in chunks], np.int32),
        block_tables=tables,
        logit_rows=np.arange(offsets[-1], dtype=np.int32) if all_rows else offsets[1:] - 1,
        prompt_lengths=np.full(offsets[-1], 7, np.int32),
    )


def test_a_mixed_step_arrives_whole() -> None:
    step = batch([(0, 6), (8, 9), (3, 5)])
    plan = plan_step(step, BLOCK_SIZE, tile_rows=4)
    inputs = StepBuffer(plan.shape, torch.device("cpu"), 4).load(plan)
    assert inputs.token_ids.tolist() == step.token_ids.tolist() and inputs.token_ids.dtype == torch.int64
    assert inputs.positions.tolist() == step.positions.tolist()
    assert inputs.prompt_lengths.tolist() == [7] * 9
    assert inputs.logit_rows.tolist() == [5, 6, 8]
    attention = inputs.attention
    assert attention.slots.tolist() == [0, 1, 2, 3, 4, 5, 12 * 4, 20 * 4 + 3, 21 * 4]
    assert attention.block_tables.tolist() == step.block_tables.tolist()
    assert sorted(attention.tiles.tolist()) == [[0, 0], [0, 4], [2, 7]]
    assert attention.decode_sequences.tolist() == [1] and attention.longest_context == 9
    assert attention.decode_groups == (1,) and attention.keys_before.tolist() == [0]


def test_a_decode_step_is_filled_up_to_its_bucket() -> None:
    step = batch([(8, 9), (2, 3)])
    bucket = DecodeBucket(4, 16, BLOCK_SIZE)
    draws = Draws(
        np.array([0, 1], np.float64), np.array([3, 0], np.int32), np.array([0.5, 1], np.float64),
        np.zeros(2, np.float64), np.array([0, 0.25], np.float64),
    )  # fmt: skip
    plan = plan_step(step, BLOCK_SIZE, 4, bucket, draws=draws, token_rows=np.array([1, 0], np.int32))
    inputs = StepBuffer(bucket.shape, torch.device("cpu"), 1).load(plan)
    assert inputs.attention.slots.tolist() == [2 * 4, 10 * 4 + 2, NO_SLOT, NO_SLOT]
    assert inputs.attention.context_lengths.tolist() == [9, 3, 0, 0]
    assert inputs.attention.block_tables.tolist() == [[0, 1, 2, 0], [10, -1, -1, 0], [0] * 4, [0] * 4]
    assert inputs.attention.sequence_offsets.tolist() == [0, 1, 2, 3, 4]
    assert inputs.attention.decode_sequences.tolist() == [0, 1, 2, 3] and inputs.attention.longest_context == 16
    assert inputs.attention.decode_groups == (4,) and inputs.attention.keys_before.tolist() == [0, 9, 0, 0]
    assert inputs.logit_rows.tolist() == [0, 1, 2, 3]
    assert inputs.token_rows.tolist() == [1, 0, 0, 0]
    assert inputs.temperature.tolist() == [0, 1, 0, 0] and inputs.top_k.tolist() == [3, 0, 0, 0]


def test_decode_sequences_beyond_the_limits_are_launched_in_groups() -> None:
    step = batch([(8, 9), (0, 6), (2, 3), (9, 10), (3, 4)])
    plan = plan_step(step, BLOCK_SIZE, 4, limits=DecodeLimits(12, 3))
    sums = SplitSums.allocate(64, DecodeLimits(12, 3), torch.device("cpu"))
    attention = StepBuffer(plan.shape, torch.device("cpu"), 4, sums=sums).load(plan).attention
    assert attention.decode_sequences.tolist() == [0, 2, 3, 4]
    assert attention.decode_groups == (2, 1, 1) and attention.keys_before.tolist() == [0, 9, 0, 0]
    assert attention.sums is sums


def test_what_counts_as_decoding() -> None:
    assert is_decode(batch([(8, 9), (0, 1)]))
    assert not is_decode(batch([(8, 9), (0, 2)]))
    few = batch([(8, 9), (0, 1)])
    assert not is_decode(StepBatch(**{**vars(few), "logit_rows": few.logit_rows[:1]}))


def test_two_steps_in_a_row_keep_what_each_was_given() -> None:
    """The second is written while the copy of the first may still wait: to other memory of the host."""
    first, second = (plan_step(batch([(end - 1, end)]), BLOCK_SIZE, 4) for end in (3, 4))
    assert first.shape != second.shape or first.arrays["positions"].tolist() != second.arrays["positions"].tolist()
    buffer = StepBuffer(first.shape, torch.device("cpu"), 4, capacity=4096)
    buffer.write(first)
    memory = buffer._hosts[0].clone()
    buffer.write(second)
    assert torch.equal(buffer._hosts[1], memory)

"""Lays scheduled chunks out as the arrays a backend takes, and remembers whose logits come back in which row."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np

from inferencex.formats.records import record
from inferencex.runtime.backends.base import Int32Array, StepBatch
from inferencex.runtime.engine.scheduler import ScheduledChunk
from inferencex.runtime.engine.sequence import Sequence


@record(frozen=True)
class PromptRows:
    """Rows of logits that tell how likely a piece of a prompt was.

    Row `first_row + i` predicts the prompt token at position `first_position + i`, for `i < count`.
    """

    sequence: Sequence
    first_row: int
    first_position: int
    count: int


@record(frozen=True)
class PooledRows:
    """Rows of hidden states, the `count` from `first_row` on, that go into an embedding.

    is_last: whether no more will come
    """

    sequence: Sequence
    first_row: int
    count: int
    is_last: bool


@record(frozen=True)
class StepLayout:
    """A step's arrays, with the sequences that get a token from it and the row of logits each gets it from."""

    batch: StepBatch
    sampled: tuple[Sequence, ...]
    sampled_rows: tuple[int, ...]
    prompt_rows: tuple[PromptRows, ...]


def lay_out(chunks: SequenceOf[ScheduledChunk], block_size: int) -> StepLayout:
    """Return the layout of a step; a sequence is sampled when the step computes its last known token."""
    sequences = [chunk.sequence for chunk in chunks]
    token_ids: list[int] = []
    positions: list[int] = []
    offsets = [0]
    contexts: list[int] = []
    prompt_lengths: list[int] = []
    logit_rows: list[int] = []
    sampled: list[Sequence] = []
    sampled_rows: list[int] = []
    prompt_rows: list[PromptRows] = []
    for chunk, sequence in zip(chunks, sequences, strict=True):
        start, known = sequence.num_computed_tokens, sequence.token_ids
        end = start + chunk.num_tokens
        if sequence.wants_prompt_logprobs:
            first = max(start, sequence.first_prompt_row)
            count = max(0, min(end, sequence.num_prompt_tokens - 1) - first)
            prompt_rows.append(PromptRows(sequence, len(logit_rows), first + 1, count))
            logit_rows.extend(range(offsets[-1] + first - start, offsets[-1] + first - start + count))
        if chunk.num_tokens == 1:  # one of many sequences that decode
            token_ids.append(known[start])
            positions.append(start)
            prompt_lengths.append(sequence.num_prompt_tokens)
        else:
            token_ids += known[start:end]
            positions += range(start, end)
            prompt_lengths += [sequence.num_prompt_tokens] * chunk.num_tokens
        offsets.append(len(token_ids))
        contexts.append(end)
        if end == len(known):
            sampled.append(sequence)
            sampled_rows.append(len(logit_rows))
            logit_rows.append(len(token_ids) - 1)
    batch = StepBatch(
        token_ids=np.array(token_ids, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        sequence_offsets=np.array(offsets, dtype=np.int32),
        context_lengths=np.array(contexts, dtype=np.int32),
        block_tables=block_tables(sequences, -(-max(contexts) // block_size)),
        logit_rows=np.array(logit_rows, dtype=np.int32),
        prompt_lengths=np.array(prompt_lengths, dtype=np.int32),
    )
    return StepLayout(batch, tuple(sampled), tuple(sampled_rows), tuple(prompt_rows))


def lay_out_pooled(chunks: SequenceOf[ScheduledChunk], block_size: int) -> tuple[StepBatch, list[PooledRows]]:
    """Return the arrays of a step over prompts that are embedded, and where their hidden states come back."""
    batch = lay_out(chunks, block_size).batch
    logit_rows: list[int] = []
    pooled: list[PooledRows] = []
    for chunk, end in zip(chunks, batch.sequence_offsets[1:].tolist(), strict=True):
        sequence, pool = chunk.sequence, chunk.sequence.request.pool
        computed = sequence.num_computed_tokens + chunk.num_tokens
        is_last = computed == len(sequence.token_ids)
        count = int(is_last)
        if pool is not None and pool.reads_every_token:  # after a preemption, it has seen the first ones already
            count = min(chunk.num_tokens, max(0, computed - pool.num_added))
        pooled.append(PooledRows(sequence, len(logit_rows), count, is_last))
        logit_rows += range(end - count, end)
    return replace(batch, logit_rows=np.array(logit_rows, dtype=np.int32)), pooled


def block_tables(sequences: SequenceOf[Sequence], width: int) -> Int32Array:
    """Return the tables as rows of one array, cut or filled with -1 to `width` blocks."""
    num_bytes = 4 * width
    # In int32 the bytes of -1 are all ones.
    rows = bytearray().join(
        [sequence.block_table[:width].tobytes().ljust(num_bytes, b"\xff") for sequence in sequences]
    )
    return np.frombuffer(rows, dtype=np.int32).reshape(len(sequences), width)

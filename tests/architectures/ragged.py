"""Drive an executable through several steps over sequences of different lengths, cut and interleaved differently."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from inferencex.runtime.backends.base import Executable, StepBatch

LENGTHS = (1, 3, 7, 20, 33)
BLOCK_SIZE = 4

# For each sequence the step at which it enters and its chunk sizes, the last one repeated: whole prompts, single
# tokens, and chunks that end inside and on the border of a block.
CUTS: Sequence[tuple[int, Sequence[int]]] = ((2, (1,)), (0, (1,)), (1, (4, 3)), (0, (6, 8, 1)), (1, (13, 1, 5, 2)))


def random_sequences(vocab_size: int, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[list[int]]:
    """Return one list of token ids per length."""
    rng = np.random.default_rng(seed)
    return [[int(token) for token in rng.integers(0, vocab_size, length)] for length in lengths]


def blocks_needed(lengths: Sequence[int], block_size: int = BLOCK_SIZE) -> int:
    """Return how many blocks hold sequences of these lengths."""
    return sum(-(-length // block_size) for length in lengths)


def ragged_logits(
    executable: Executable, sequences: Sequence[Sequence[int]], block_size: int = BLOCK_SIZE
) -> list[NDArray[np.float32]]:
    """Return the logits float32 `[length, vocab]` of every sequence, all of them run together in chunks."""
    tables = _block_tables([len(tokens) for tokens in sequences], block_size)
    rows: list[list[NDArray[np.float32]]] = [[] for _ in sequences]
    for step in _steps([len(tokens) for tokens in sequences]):
        batch = _batch(step, sequences, tables)
        logits = executable.step(batch)
        for (sequence, _, _), first, last in zip(
            step, batch.sequence_offsets[:-1], batch.sequence_offsets[1:], strict=True
        ):
            rows[sequence].append(logits[first:last].copy())
    return [np.concatenate(parts) for parts in rows]


def last_logits(executable: Executable, tokens: Sequence[int], block_size: int = BLOCK_SIZE) -> NDArray[np.float32]:
    """Return the logits float32 `[1, vocab]` after a sequence, run alone in two chunks; only that row is asked for."""
    tables = _block_tables([len(tokens)], block_size)
    first = len(tokens) // 2
    prefix = _batch([(0, 0, first)], [tokens], tables)
    nothing = executable.step(replace(prefix, logit_rows=np.zeros(0, np.int32)))
    assert nothing.shape == (0, executable.facts.vocab_size)
    rest = _batch([(0, first, len(tokens) - first)], [tokens], tables)
    return executable.step(replace(rest, logit_rows=rest.logit_rows[-1:])).copy()


def _steps(lengths: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield, step by step, the chunks `(sequence, first token, number of tokens)` that run together."""
    done = [0] * len(lengths)
    turn = 0
    while any(d < length for d, length in zip(done, lengths, strict=True)):
        chunks = []
        for sequence, length in enumerate(lengths):
            enters, sizes = CUTS[sequence % len(CUTS)]
            if turn < enters or done[sequence] == length:
                continue
            size = min(sizes[min(turn - enters, len(sizes) - 1)], length - done[sequence])
            chunks.append((sequence, done[sequence], size))
            done[sequence] += size
        turn += 1
        if chunks:
            yield chunks if turn % 2 else chunks[::-1]


def _block_tables(lengths: Sequence[int], block_size: int) -> NDArray[np.int32]:
    """Hand out blocks in no order, so that neighbours in a sequence are not neighbours in the pool."""
    counts = [-(-length // block_size) for length in lengths]
    shuffled = np.random.default_rng(1).permutation(sum(counts)).astype(np.int32)
    tables = np.full((len(lengths), max(counts)), -1, np.int32)
    for row, count, end in zip(tables, counts, accumulate(counts), strict=True):
        row[:count] = shuffled[end - count : end]
    return tables


def _batch(
    step: Sequence[tuple[int, int, int]], sequences: Sequence[Sequence[int]], tables: NDArray[np.int32]
) -> StepBatch:
    token_ids = [token for s, first, size in step for token in sequences[s][first : first + size]]
    return StepBatch(
        token_ids=np.array(token_ids, np.int32),
        positions=np.array([p for _, first, size in step for p in range(first, first + size)], np.int32),
        sequence_offsets=np.array([0, *accumulate(size for _, _, size in step)], np.int32),
        context_lengths=np.array([first + size for _, first, size in step], np.int32),
        block_tables=tables[[s for s, _, _ in step]],
        logit_rows=np.arange(len(token_ids), dtype=np.int32),
        prompt_lengths=np.array([len(sequences[s]) for s, _, size in step for _ in range(size)], np.int32),
    )

"""A request's logits are the same bits alone, among others, however it is cut into steps, and on a prefix-cache hit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("transformers", reason="needs the extra inferencex[convert]")

from inferencex.runtime.backends.base import BackendOptions, Executable, StepBatch
from inferencex.runtime.backends.cpu import CpuBackend
from tests.architectures.comparison import write_bundle
from tests.architectures.shrink import tiny_config
from tests.architectures.zoo import tiny_model

BLOCK_SIZE, BLOCKS_EACH, SEQUENCES, VOCABULARY = 16, 4, 32, 250
LENGTH = BLOCK_SIZE * BLOCKS_EACH


@dataclass(frozen=True)
class Chunk:
    """New tokens `first:last` of a sequence whose blocks are `blocks`."""

    tokens: list[int]
    first: int
    last: int
    blocks: list[int]


@pytest.fixture(scope="module", params=["rtn-int4", "rtn-int8", "none"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return write_bundle(tiny_model("llama"), tiny_config("llama"), folder, request.param)


@pytest.fixture(params=["auto", "float16", "int8"])
def executables(request: pytest.FixtureRequest, bundle: Path) -> list[Executable]:
    """The same bundle on one, two and three threads."""
    return [
        CpuBackend().compile(
            bundle,
            BackendOptions(
                num_blocks=SEQUENCES * BLOCKS_EACH + 8,
                block_size=BLOCK_SIZE,
                threads=threads,
                kv_cache_dtype=request.param,
                max_num_batched_tokens=SEQUENCES * LENGTH,
            ),
        )
        for threads in (1, 2, 3)
    ]


def _run(executable: Executable, chunks: list[Chunk]) -> list[NDArray[np.float32]]:
    """Run the chunks as one step and return the logits of each."""
    counts = [chunk.last - chunk.first for chunk in chunks]
    offsets = [0, *accumulate(counts)]
    batch = StepBatch(
        token_ids=np.array([t for c in chunks for t in c.tokens[c.first : c.last]], np.int32),
        positions=np.array([p for c in chunks for p in range(c.first, c.last)], np.int32),
        sequence_offsets=np.array(offsets, np.int32),
        context_lengths=np.array([c.last for c in chunks], np.int32),
        block_tables=np.array([c.blocks for c in chunks], np.int32),
        logit_rows=np.arange(offsets[-1], dtype=np.int32),
        prompt_lengths=np.array([len(c.tokens) for c in chunks for _ in range(c.first, c.last)], np.int32),
    )
    logits = executable.step(batch).copy()
    return [logits[a:b] for a, b in pairwise(offsets)]


def _cuts(rng: np.random.Generator, length: int) -> Iterator[tuple[int, int]]:
    done = 0
    while done < length:
        size = min(int(rng.choice([1, 1, 2, 7, 15, 16, 30])), length - done)
        yield done, done + size
        done += size


def test_logits_are_the_same_bits(executables: list[Executable]) -> None:
    rng = np.random.default_rng(7)
    sequences = [rng.integers(0, VOCABULARY, rng.integers(1, LENGTH + 1)).tolist() for _ in range(SEQUENCES)]
    sequences[0] = rng.integers(0, VOCABULARY, LENGTH).tolist()
    tables = rng.permutation(SEQUENCES * BLOCKS_EACH).reshape(SEQUENCES, BLOCKS_EACH).tolist()
    alone = [
        _run(executables[0], [Chunk(tokens, 0, len(tokens), table)])[0]
        for tokens, table in zip(sequences, tables, strict=True)
    ]
    for executable in executables:
        together = _run(executable, [Chunk(s, 0, len(s), t) for s, t in zip(sequences, tables, strict=True)])
        for expected, found in zip(alone, together, strict=True):
            np.testing.assert_array_equal(found, expected)
        # In pieces of many sizes, all sequences together; the pool is handed out in another order.
        shuffled = rng.permutation(tables).tolist()
        pieces = [list(_cuts(rng, len(tokens))) for tokens in sequences]
        for turn in range(max(map(len, pieces))):
            running = [s for s in range(SEQUENCES) if turn < len(pieces[s])]
            chunks = [Chunk(sequences[s], *pieces[s][turn], shuffled[s]) for s in running]
            for s, chunk, found in zip(running, chunks, _run(executable, chunks), strict=True):
                np.testing.assert_array_equal(found, alone[s][chunk.first : chunk.last])
        # A prefix that another sequence computed: whole blocks of the first sequence, then its own.
        for shared in range(1, BLOCKS_EACH):
            own = list(range(SEQUENCES * BLOCKS_EACH, SEQUENCES * BLOCKS_EACH + BLOCKS_EACH - shared))
            hit = Chunk(sequences[0], shared * BLOCK_SIZE, LENGTH, shuffled[0][:shared] + own)
            np.testing.assert_array_equal(_run(executable, [hit])[0], alone[0][shared * BLOCK_SIZE :])


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "float32", "int8"])
def test_long_contexts_are_merged_the_same_way(kv_cache_dtype: str, tmp_path: Path) -> None:
    """Attention sums the keys of a long context in parts, which threads may share in a decode step."""
    length, last = 1100, 3
    config = {"max_position_embeddings": 2048}
    path = write_bundle(
        tiny_model("llama", **config), tiny_config("llama", **config), tmp_path, "rtn-int4", max_model_len=length
    )
    tokens = np.random.default_rng(3).integers(0, VOCABULARY, length).tolist()
    blocks = list(range(-(-length // BLOCK_SIZE)))
    results = []
    for threads, cuts in ((1, [0, length]), (2, [0, 500, 513, 1024, length - last]), (3, [0, 1, 700, length - last])):
        executable = CpuBackend().compile(
            path,
            BackendOptions(
                num_blocks=len(blocks), threads=threads, max_num_batched_tokens=length, kv_cache_dtype=kv_cache_dtype
            ),
        )
        steps = [*pairwise(cuts), *((p, p + 1) for p in range(cuts[-1], length))]
        logits = [_run(executable, [Chunk(tokens, a, b, blocks)])[0] for a, b in steps]
        results.append(np.concatenate(logits))
    np.testing.assert_array_equal(results[1], results[0])
    np.testing.assert_array_equal(results[2], results[0])

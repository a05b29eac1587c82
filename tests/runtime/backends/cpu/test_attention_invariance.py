"""Attention of the CPU backend is the same however a sequence is cut, and whatever is beside and behind it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.runtime.backends.cpu.attention_layers import ISAS, KV_DTYPES, Cache, Layer, Tokens, in_chunks, tables_for


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(
    "layer",
    [
        Layer(),
        Layer(heads=7, kv_heads=1, window=600, sinks=True),
        Layer(block_size=5, num_blocks=300, softcap=2.0, slopes=True),
        Layer(kv_heads=6, key_width=20, value_width=12, rotary_dim=0, chunk=700),
    ],
    ids=["plain", "window", "small blocks", "chunk"],
)
def test_results_are_independent_of_chunking_threads_and_blocks(layer: Layer, kv_dtype: str, isa: str) -> None:
    layer = replace(layer, kv_dtype=kv_dtype)
    length = 560 if layer.block_size == 5 else 1060  # more than two chunks of keys either way
    tokens = Tokens.random(layer, length, 3)
    tables = tables_for(layer, [length]), tables_for(layer, [length], seed=1)
    whole = in_chunks(Cache(layer, isa), tokens, (), tables[0][0])
    last = [*range(length - 4, length)]
    for threads, cuts, table in [(2, last, tables[1][0]), (3, [1, 130, 515, *last], tables[0][0])]:
        assert np.array_equal(in_chunks(Cache(layer, isa, threads), tokens, cuts, table), whole)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("window", [72, 80, 134])
def test_what_a_window_leaves_is_independent_of_chunking(window: int, kv_dtype: str) -> None:
    """Queries side by side in a long step, of which some see keys that the others do not see any more."""
    layer = Layer(heads=4, kv_heads=4, window=window, kv_dtype=kv_dtype)
    for seed in range(4):
        tokens = Tokens.random(layer, 450, seed)
        table = tables_for(layer, [450])[0]
        whole = in_chunks(Cache(layer), tokens, (), table)
        assert np.array_equal(in_chunks(Cache(layer), tokens, range(3, 450, 3), table), whole)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_sequence_is_independent_of_its_neighbours(kv_dtype: str, threads: int) -> None:
    layer = Layer(kv_dtype=kv_dtype, heads=3, kv_heads=1, rotary_dim=0)
    rng = np.random.default_rng(5)
    lengths = [600, *rng.integers(2, 60, 31).tolist()]
    sequences = [Tokens.random(layer, length, i) for i, length in enumerate(lengths)]
    tables = tables_for(layer, lengths)
    cache = Cache(layer, threads=threads)
    starts = [int(rng.integers(1, length)) if i % 3 else length - 1 for i, length in enumerate(lengths)]
    cache.step(sequences, [(0, start) for start in starts], tables)
    together = cache.step(sequences, list(zip(starts, lengths, strict=True)), tables)
    row = 0
    for sequence, start, table in zip(sequences, starts, tables, strict=True):
        alone = Cache(layer)
        y = in_chunks(alone, sequence, (start,), table)[start:]
        assert np.array_equal(together[row : row + len(y)], y)
        row += len(y)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_what_earlier_tokens_left_in_a_block_has_no_influence(kv_dtype: str) -> None:
    layer = Layer(num_blocks=4, block_size=32, kv_dtype=kv_dtype)
    old, new = Tokens.random(layer, 100, 0), Tokens.random(layer, 41, 1)
    old.v[:] = np.inf
    old.k[:] = np.nan
    cache = Cache(layer)
    cache.step([old], [(0, 100)], [[0, 1, 2, 3]])
    reused = in_chunks(cache, new, (30,), [3, 0])
    assert np.array_equal(reused, in_chunks(Cache(layer), new, (30,), [3, 0]))


def test_nothing_outside_the_pool_is_touched_when_a_table_is_wrong() -> None:
    layer = Layer(num_blocks=4)
    tokens = Tokens.random(layer, 40, 0)
    cache = Cache(layer)
    before = cache.space.copy()
    for table in ([2**30, -1, 4], [-(2**31), 2**31 - 1, 4]):
        cache.step([tokens], [(0, 40)], [table])
    assert np.array_equal(cache.space, before)

"""How a step is cut in tiles of queries, and contexts in splits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencex.runtime.backends.triton.attention_tiles import (
    SHARED_KEYS,
    DecodeLimits,
    decode_groups,
    most_splits,
    plan_tiles,
    split_keys,
)
from inferencex.runtime.backends.triton.kernels.attention_keys import parts_of
from inferencex.runtime.backends.triton.kernels.split_sums import places_of


def test_tiles_of_a_step() -> None:
    """Sequences of one token are for decode, those without any for nobody, and the longest tiles come first."""
    offsets = np.array([0, 5, 6, 6, 8, 9], np.int32)
    planned = plan_tiles(offsets, np.array([5, 40, 7, 30, 1], np.int32), 2)
    # Keys that the tiles see: 2, 4 and 5 of the first sequence, 30 of the fourth.
    assert planned.tiles.tolist() == [[3, 6], [0, 4], [0, 2], [0, 0]]
    assert planned.decode_sequences.tolist() == [1, 4]
    assert planned.decode_groups == (2,) and planned.keys_before.tolist() == [0, 40]
    assert planned.tiles.dtype == planned.decode_sequences.dtype == np.int32


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 50)), min_size=1, max_size=8), st.integers(1, 20))
def test_every_new_token_is_in_one_place(sequences: list[tuple[int, int]], tile_rows: int) -> None:
    """Tiles and decode sequences together cover the rows of a step, each once, and no tile crosses a sequence."""
    offsets = np.cumsum([0, *(new for new, _ in sequences)], dtype=np.int32)
    contexts = np.array([new + earlier for new, earlier in sequences], np.int32)
    planned = plan_tiles(offsets, contexts, tile_rows)
    rows = [offsets[sequence] for sequence in planned.decode_sequences]
    seen = []
    for sequence, first in planned.tiles:
        end = min(first + tile_rows, offsets[sequence + 1])
        assert offsets[sequence] <= first < end
        rows += range(first, end)
        seen.append(contexts[sequence] - (offsets[sequence + 1] - end))
    assert sorted(rows) == list(range(offsets[-1]))
    assert seen == sorted(seen, reverse=True)


@given(
    st.integers(1, 3000),
    st.sampled_from([32, 256]),
    st.integers(0, 600),
    st.integers(0, 600),
)
def test_splits_that_a_query_sees(context: int, split: int, window: int, chunk: int) -> None:
    """The bound holds for the last query of every context up to the longest, and some context needs it."""
    needed = 0
    for length in range(1, context + 1):
        first = max(0, length - window if window else 0, (length - 1) // chunk * chunk if chunk else 0)
        needed = max(needed, -(-length // split) - first // split)
    bound = most_splits(context, split, window, chunk)
    assert bound >= needed
    if not chunk:
        assert bound == needed or context < window + split


CONTEXTS = st.lists(st.integers(0, 700), max_size=12)


@given(CONTEXTS, st.integers(700, 2000), st.integers(1, 5))
def test_groups_are_what_launches_may_take(contexts: list[int], keys: int, sequences: int) -> None:
    """Every sequence is in one group, none exceeds the limits, and none could take the first of the next."""
    limits = DecodeLimits(keys, sequences)
    groups, keys_before = decode_groups(np.array(contexts, np.int32), limits)
    assert sum(groups) == len(contexts) and all(groups)
    first = 0
    for count in groups:
        group = contexts[first : first + count]
        assert limits.hold(sum(group), count)
        assert keys_before[first : first + count].tolist() == [sum(group[:place]) for place in range(count)]
        first += count
        assert first == len(contexts) or not limits.hold(sum(group) + contexts[first], count + 1)


@given(CONTEXTS, st.sampled_from([1, 7, 32, 256, 1024]))
def test_sums_of_sequences_lie_apart(contexts: list[int], split: int) -> None:
    """Each sequence begins behind the splits of the one before, and the last ends within the places that are there."""
    _, keys_before = decode_groups(np.array(contexts, np.int32), None)
    end = 0
    for at, (context, before) in enumerate(zip(contexts, keys_before, strict=True)):
        first = (int(before) + at * (split - 1)) // split
        assert first >= end
        end = first + -(-context // split)
    assert end <= places_of(DecodeLimits(sum(contexts), len(contexts)), split)


def test_limits_of_a_pool() -> None:
    """What sequences can have, but for what they share: and a single one always has its place."""
    assert DecodeLimits.of_pool(10**6, 64, 1000) == DecodeLimits(64000, 64)
    limits = DecodeLimits.of_pool(10**6, 64, 131072)
    assert limits == DecodeLimits(SHARED_KEYS * 10**6, 64) and limits.hold(131072, 1)
    many = DecodeLimits(2**31, 4)
    groups, keys_before = decode_groups(np.full(6, 2**30, np.int32), many)
    assert groups == (2, 2, 2) and keys_before.max() == 2**30, "keys are counted in 64 bits"


def test_no_context_needs_a_split_all_the_same() -> None:
    """A grid is not empty."""
    assert most_splits(0, 256, 0, 0) == 1


@pytest.mark.parametrize(
    "heads,kv_heads,key_width,value_width,itemsize,split",
    [(32, 8, 128, 128, 2, 256), (32, 32, 128, 128, 1, 256), (64, 8, 64, 64, 1, 256), (128, 1, 576, 512, 2, 1024)],
)
def test_split_of_a_layer(
    heads: int, kv_heads: int, key_width: int, value_width: int, itemsize: int, split: int
) -> None:
    """Many query heads of one KV head leave large sums, and want long splits."""
    assert split_keys(heads, kv_heads, key_width, value_width, itemsize) == split


@given(st.integers(1, 1024))
def test_parts_cover_a_width(width: int) -> None:
    """Parts are powers of two from 16 up, cover the width, and waste less than one part would."""
    main, tail = parts_of(width)
    for part in (main, tail):
        assert part == 0 or (part >= 16 and part & (part - 1) == 0)
    assert main + tail >= width
    assert tail < main
    assert main + tail < 2 * max(width, 16)

"""Planning attention of a step on the host: which tiles of queries there are, and how contexts are split.

No device work: everything is computed from the numbers of a step batch once, and used by all layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inferencex.runtime.backends.base import Int32Array

SPLITS = (256, 512, 1024)
"""Keys that a program of decode can take: fewer leave it too little to read for what it costs to start one, more leave
a GPU idle at batch 1."""


SHARED_KEYS = 2
"""So many times the tokens of the pool one launch of decode may take: sequences that share blocks have more keys
together than there are, and what they share leaves sums for each of them. Steps beyond it read more than twice the
pool: to launch them one by one, and in groups, is little beside that."""


@dataclass(frozen=True)
class DecodeLimits:
    """What one launch of decode may take, so that the sums that its splits leave have a place.

    keys:      of all its sequences together
    sequences: their number
    """

    keys: int
    sequences: int

    @classmethod
    def of_pool(cls, slots: int, max_sequences: int, max_model_len: int) -> DecodeLimits:
        """Return the limits for a pool of so many slots: all that steps can need, but for much of it shared.

        No single sequence exceeds them.
        """
        return cls(min(max_sequences * max_model_len, SHARED_KEYS * slots), max_sequences)

    def hold(self, keys: int, sequences: int) -> bool:
        """Tell whether one launch may take these."""
        return keys <= self.keys and sequences <= self.sequences


@dataclass(frozen=True)
class AttentionTiles:
    """What attention of a step is cut into.

    tiles:            int32 [n, 2], sequence and first row in the step of up to `tile_rows` consecutive new tokens, for
                      sequences with more than one; those that see most keys come first, so that no program starts late
                      that takes long
    decode_sequences: int32 [D], sequences with one new token, ascending
    decode_groups:    how many of these, one after the other, each launch of decode takes
    keys_before:      int64 [D], keys of the sequences before it in its group
    """

    tiles: Int32Array
    decode_sequences: Int32Array
    decode_groups: tuple[int, ...]
    keys_before: NDArray[np.int64]


def plan_tiles(
    sequence_offsets: Int32Array, context_lengths: Int32Array, tile_rows: int, limits: DecodeLimits | None = None
) -> AttentionTiles:
    """Cut the new tokens of a step in tiles of `tile_rows`; sequences of one token go to the kernels of decode.

    `sequence_offsets [S + 1]` and `context_lengths [S]` are those of a `StepBatch`. Sequences without new tokens get
    nothing. `limits` are those of a launch of decode; without them one takes all.
    """
    new_tokens = np.diff(sequence_offsets)
    counts = np.where(new_tokens > 1, -(-new_tokens // tile_rows), 0)
    sequences = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    within = np.arange(len(sequences)) - np.repeat(np.cumsum(counts) - counts, counts)
    first_rows = sequence_offsets[sequences] + within * tile_rows
    ends = np.minimum(first_rows + tile_rows, sequence_offsets[sequences + 1])
    keys = context_lengths[sequences] - (sequence_offsets[sequences + 1] - ends)
    order = np.argsort(-keys, kind="stable")
    tiles = np.stack([sequences, first_rows], axis=1).astype(np.int32)[order]
    decode_sequences = np.flatnonzero(new_tokens == 1).astype(np.int32)
    groups, keys_before = decode_groups(context_lengths[decode_sequences], limits)
    return AttentionTiles(tiles, decode_sequences, groups, keys_before)


def decode_groups(contexts: Int32Array, limits: DecodeLimits | None) -> tuple[tuple[int, ...], NDArray[np.int64]]:
    """Return how many sequences of these contexts each launch takes, and the keys before each in its launch.

    Sequences stay in order. One that exceeds `limits` has a launch of its own.
    """
    ends = np.cumsum(contexts, dtype=np.int64)
    before = ends - contexts
    if not len(contexts):
        return (), before
    if limits is None or limits.hold(int(ends[-1]), len(contexts)):
        return (len(contexts),), before
    groups, first = [], 0
    while first < len(contexts):
        start = int(before[first])
        end = int(np.searchsorted(ends, start + limits.keys, side="right"))
        end = max(min(end, first + limits.sequences), first + 1)
        before[first:end] -= start
        groups.append(end - first)
        first = end
    return tuple(groups), before


def split_keys(num_heads: int, num_kv_heads: int, key_width: int, value_width: int, itemsize: int) -> int:
    """Return the keys that a program of decode takes: a power of two, the same whatever else is in a batch.

    It is the least for which the sums that splits leave, `H * (Dv + 2)` floats written and read, are a quarter of the
    keys and values that are read, within `SPLITS`. `itemsize` is that of the pages.
    """
    left = 2 * 4 * num_heads * (value_width + 2)
    read = num_kv_heads * (key_width + value_width) * itemsize
    return next((split for split in SPLITS if 4 * left <= split * read), SPLITS[-1])


def most_splits(longest_context: int, split: int, window: int, chunk: int) -> int:
    """Return in how many splits the keys can lie that one query sees, of contexts up to `longest_context`; 1 at least.

    `window` and `chunk` are those of the layer, 0 for none.
    """
    splits = -(-longest_context // split)
    for keys in (window, chunk):
        if keys:
            # A range of `keys` keys may begin at the last key of a split; chunks of whole splits begin at the first.
            splits = min(
                splits, keys // split if keys == chunk and keys % split == 0 else (keys + split - 2) // split + 1
            )
    return max(splits, 1)

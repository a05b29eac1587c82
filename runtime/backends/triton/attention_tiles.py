"""Planning attention of a step on the host: which tiles of queries there are, and how contexts are split.

No device work: everything is computed from the numbers of a step batch once, and used by all layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from inferencex.runtime.backends.base import Int32Array

SPLITS = (256, 512, 1024)
"""Keys that a program of decode can take: fewer leave it too little to read for what it costs to start one, more leave
a GPU idle at batch 1."""


@dataclass(frozen=True)
class AttentionTiles:
    """What attention of a step is cut into.

    tiles:            int32 [n, 2], sequence and first row in the step of up to `tile_rows` consecutive new tokens, for
                      sequences with more than one; those that see most keys come first, so that no program starts late
                      that takes long
    decode_sequences: int32 [D], sequences with one new token, ascending
    """

    tiles: Int32Array
    decode_sequences: Int32Array


def plan_tiles(sequence_offsets: Int32Array, context_lengths: Int32Array, tile_rows: int) -> AttentionTiles:
    """Cut the new tokens of a step in tiles of `tile_rows`; sequences of one token go to the kernels of decode.

    `sequence_offsets [S + 1]` and `context_lengths [S]` are those of a `StepBatch`. Sequences without new tokens get
    nothing.
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
    return AttentionTiles(tiles, np.flatnonzero(new_tokens == 1).astype(np.int32))


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

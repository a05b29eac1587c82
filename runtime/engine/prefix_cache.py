"""Finds blocks by the tokens they hold, so that equal prefixes are computed once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from inferencex.formats.records import record


@record(frozen=True)
class BlockKey:
    """What a full block holds: its tokens, and the identity of everything before them.

    `parent` is the content id of the block before, or the root of the chain for the first. Keys are
    compared whole, tokens included, so two prefixes whose hashes collide are still two prefixes.
    """

    parent: Hashable
    token_ids: tuple[int, ...]


@record(frozen=True)
class CachedBlock:
    """A block with known content. A content id is never given out twice, even when the block is reused."""

    block_id: int
    content_id: int


class PrefixCache:
    """Index from content to block, for blocks in use and free ones alike. Holds no references itself."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[BlockKey, CachedBlock] = {}
        self._keys: dict[int, BlockKey] = {}
        self._next_content_id = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, root: Hashable, token_ids: Sequence[int], max_tokens: int) -> list[CachedBlock]:
        """Return the blocks that hold the start of `token_ids`, for at most `max_tokens` of them."""
        found: list[CachedBlock] = []
        parent = root
        size = self._block_size
        for start in range(0, max_tokens - size + 1, size):
            cached = self._blocks.get(BlockKey(parent, tuple(token_ids[start : start + size])))
            if cached is None:
                break
            found.append(cached)
            parent = cached.content_id
        return found

    def insert(self, parent: Hashable, token_ids: Sequence[int], block_id: int) -> int:
        """Record what a full block holds and return its content id, that of an equal block if there is one."""
        key = BlockKey(parent, tuple(token_ids))
        known = self._blocks.get(key)
        if known is not None:
            return known.content_id
        cached = CachedBlock(block_id, self._next_content_id)
        self._next_content_id += 1
        self._blocks[key] = cached
        self._keys[block_id] = key
        return cached.content_id

    def knows(self, block_id: int) -> bool:
        """Tell whether a prefix can be found in this block."""
        return block_id in self._keys

    def forget(self, block_id: int) -> None:
        """Drop what is known of a block, which is about to hold something else."""
        key = self._keys.pop(block_id, None)
        if key is not None:
            del self._blocks[key]

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the two directions of the index agree."""
        if len(self._keys) != len(self._blocks):
            raise RuntimeError(f"{len(self._keys)} cached blocks, {len(self._blocks)} keys")
        for block_id, key in self._keys.items():
            if self._blocks[key].block_id != block_id:
                raise RuntimeError(f"block {block_id} is known by a key that leads to {self._blocks[key].block_id}")

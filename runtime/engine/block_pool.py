"""The pool of fixed-size blocks that layer state lives in, shared by reference count."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from inferencex.runtime.engine.prefix_cache import PrefixCache


class BlockPool:
    """Hands out blocks `0 .. num_blocks - 1`; the blocks' contents are the backend's.

    A block is free when its reference count is 0. Free blocks whose content the prefix cache knows keep it
    until they are handed out again: blocks without content go first, then the least recently freed.

    Invariants (`check_integrity`): a block is in the free list exactly when nobody holds it, and every block
    the cache names is named once.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.cache = PrefixCache(block_size)
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, those with cached content included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that at least one sequence holds."""
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def ref_count(self, block_id: int) -> int:
        """Return how many sequences hold the block."""
        return self._ref_counts[block_id]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, forgetting what they held. The caller has checked `num_free`."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} of {self.num_blocks} are free")
        taken = []
        for _ in range(count):
            block_id, _ = self._free.popitem(last=False)
            self.cache.forget(block_id)
            self._ref_counts[block_id] = 1
            taken.append(block_id)
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """Hold blocks whose content is wanted as it is: one reference more each."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each block of a table; the table's end becomes reusable before its start."""
        for block_id in reversed(block_ids):
            if self._ref_counts[block_id] == 0:
                raise ValueError(f"block {block_id} is released once too often")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                if not self.cache.knows(block_id):
                    self._free.move_to_end(block_id, last=False)

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raise RuntimeError unless the pool agrees with the tables of all sequences that hold blocks."""
        held = Counter(block_id for table in block_tables for block_id in table)
        for block_id, count in enumerate(self._ref_counts):
            if count != held[block_id]:
                raise RuntimeError(f"block {block_id} has {count} references, {held[block_id]} sequences hold it")
            if (count == 0) != (block_id in self._free):
                raise RuntimeError(f"block {block_id} has {count} references and the free list says otherwise")
        if unknown := set(held) - set(range(self.num_blocks)):
            raise RuntimeError(f"sequences hold blocks that are not in the pool: {sorted(unknown)}")
        self.cache.check_integrity()

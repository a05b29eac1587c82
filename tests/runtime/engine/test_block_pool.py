"""Blocks are conserved, shared by count, and reused in the right order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inferencex.runtime.engine.block_pool import BlockPool


def fill(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Allocate and index the full blocks of a sequence."""
    table = pool.allocate(len(tokens) // pool.block_size)
    parent: Any = "root"
    for index, block_id in enumerate(table):
        parent = pool.cache.insert(parent, tokens[index * 2 : index * 2 + 2], block_id)
    return table


def test_free_blocks_with_content_are_reused_last_and_oldest_first() -> None:
    pool = BlockPool(5, 2)
    old = fill(pool, [1, 2, 3, 4])
    new = fill(pool, [5, 6])
    pool.release(old)
    pool.release(new)
    taken = pool.allocate(3)
    assert set(taken) == {3, 4, old[1]}, "the empty blocks, then the tail of the oldest prefix"
    assert [c.block_id for c in pool.cache.match("root", [1, 2, 3, 4], 4)] == old[:1]
    assert [c.block_id for c in pool.cache.match("root", [5, 6], 2)] == new
    pool.check_integrity([taken])


def test_blocks_without_content_are_reused_before_older_ones_with_content() -> None:
    pool = BlockPool(2, 2)
    known = fill(pool, [1, 2])
    unknown = pool.allocate(1)
    pool.release(known)
    pool.release(unknown)
    assert pool.allocate(1) == unknown


def test_sharing_keeps_a_block_until_the_last_release() -> None:
    pool = BlockPool(2, 2)
    table = fill(pool, [1, 2])
    pool.share(table)
    pool.release(table)
    assert pool.num_free == 1 and pool.ref_count(table[0]) == 1
    pool.release(table)
    assert pool.num_free == 2
    pool.share(table)
    assert pool.num_used == 1
    pool.check_integrity([table])


def test_misuse_is_an_error() -> None:
    pool = BlockPool(2, 2)
    with pytest.raises(ValueError, match="3 blocks asked for, 2 of 2 are free"):
        pool.allocate(3)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(ValueError, match="once too often"):
        pool.release(table)
    with pytest.raises(RuntimeError, match="0 references, 1 sequences"):
        pool.check_integrity([[0]])


def test_a_reused_parent_does_not_bring_its_children_back() -> None:
    """A child stays in the index when its parent block is overwritten, and must not be found behind the new content."""
    pool = BlockPool(2, 2)
    parent, child = fill(pool, [1, 2, 3, 4])
    pool.release([child])
    pool.release([parent])
    pool.share([child])
    [reused] = pool.allocate(1)
    assert reused == parent
    pool.cache.insert("root", [9, 9], reused)
    assert [c.block_id for c in pool.cache.match("root", [9, 9, 3, 4], 4)] == [reused]
    pool.cache.forget(reused)
    pool.cache.insert("root", [1, 2], reused)
    assert [c.block_id for c in pool.cache.match("root", [1, 2, 3, 4], 4)] == [reused]
    pool.check_integrity([[child], [reused]])


class PoolMachine(RuleBasedStateMachine):
    """Random sequences over a tiny alphabet come, grow, share and go; contents are tracked beside the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, 2)
        self.contents: dict[int, tuple[int, ...]] = {}
        self.tables: list[list[int]] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=2, max_size=12))
    def start(self, tokens: list[int]) -> None:
        usable = len(tokens) // 2 * 2
        hits = self.pool.cache.match("root", tokens, usable)
        for index, cached in enumerate(hits):
            assert self.contents[cached.block_id] == tuple(tokens[: index * 2 + 2])
        missing = usable // 2 - len(hits)
        if missing > self.pool.num_free - sum(self.pool.ref_count(c.block_id) == 0 for c in hits):
            return
        self.pool.share(c.block_id for c in hits)
        table = [c.block_id for c in hits] + self.pool.allocate(missing)
        parent: Any = hits[-1].content_id if hits else "root"
        for index in range(len(hits), len(table)):
            self.contents[table[index]] = tuple(tokens[: index * 2 + 2])
            parent = self.pool.cache.insert(parent, tokens[index * 2 : index * 2 + 2], table[index])
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(choose=st.randoms(use_true_random=False))
    def end(self, choose: Any) -> None:
        self.pool.release(self.tables.pop(choose.randrange(len(self.tables))))

    @invariant()
    def whole(self) -> None:
        self.pool.check_integrity(self.tables)
        if not self.tables:
            assert self.pool.num_free == self.pool.num_blocks

    def teardown(self) -> None:
        for table in self.tables:
            self.pool.release(table)
        self.pool.check_integrity([])


TestPoolMachine: Callable[..., Any] = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)  # type: ignore[attr-defined]

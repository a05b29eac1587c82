"""Decides what each step computes: which sequences, how many tokens of each, and who gives way for room."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as SequenceOf
from dataclasses import field

from inferencex.formats.records import record
from inferencex.runtime.engine.block_pool import BlockPool
from inferencex.runtime.engine.scheduler_options import SchedulerOptions as SchedulerOptions
from inferencex.runtime.engine.sequence import Sequence, Status, empty_block_table

_PROMPT_LOGPROB_BYTES = 64 << 20  # of logits that one step may return for one prompt's log-probabilities


@record
class ScheduledChunk:
    """The next `num_tokens` uncomputed tokens of one sequence."""

    sequence: Sequence
    num_tokens: int


@record
class _Draft:
    """A plan in the making."""

    budget: int
    chunks: dict[Sequence, int] = field(default_factory=dict)

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        self.chunks[sequence] = num_tokens
        self.budget -= num_tokens

    def drop(self, sequence: Sequence) -> None:
        self.budget += self.chunks.pop(sequence, 0)


class Scheduler:
    """Queues, and the blocks of the running sequences.

    Sequences are ranked: by priority under the "priority" policy, then by arrival. What makes every sequence
    finish: the highest-ranked running sequence can take blocks from all others and always gets at least one
    token a step; room is only ever taken from lower ranks; a lower rank never overtakes the head of the queue;
    and no sequence is accepted that the whole pool could not hold.

    A sequence that is preempted gives all its blocks back and computes its tokens again later (finding what
    the prefix cache still has). One that lacks a block and outranks nobody keeps its blocks and waits.
    """

    def __init__(self, pool: BlockPool, options: SchedulerOptions, vocab_size: int) -> None:
        self.pool = pool
        self.options = options
        # So that every step has room for a token of each running sequence.
        self._max_running = min(options.max_num_seqs, options.max_num_batched_tokens)
        self._max_prompt_rows = max(1, _PROMPT_LOGPROB_BYTES // (4 * vocab_size))
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that could start, or start again, once there is room."""
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        sequence.status = Status.WAITING
        insort(self._waiting, sequence, key=self._rank)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands, and release what it holds."""
        if sequence.status is Status.RUNNING:
            self._running.remove(sequence)
            self._release(sequence)
        elif sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
        sequence.status = Status.FINISHED

    def plan(self) -> list[ScheduledChunk]:
        """Return the next step's work: decodes first, then prompts already begun, then new sequences."""
        draft = _Draft(self.options.max_num_batched_tokens)
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for sequence in self._running:
            (decodes if sequence.num_uncomputed_tokens == 1 else prefills).append(sequence)
        for sequence in decodes + prefills:
            if draft.budget == 0:
                break
            if sequence.status is Status.RUNNING:  # and not preempted by one before it
                self._continue(sequence, draft)
        while self._waiting and draft.budget > 0 and self._admit(self._waiting[0], draft):
            pass
        return [ScheduledChunk(sequence, count) for sequence, count in draft.chunks.items()]

    def reserve(self, sequences: SequenceOf[Sequence], num_tokens: SequenceOf[int]) -> bool:
        """Give running sequences the blocks for so many tokens of each; nothing, and False, where not all fit."""
        missing = [
            max(0, self.pool.blocks_for(count) - len(sequence.block_table))
            for sequence, count in zip(sequences, num_tokens, strict=True)
        ]
        if sum(missing) > self.pool.num_free:
            return False
        for sequence, count in zip(sequences, missing, strict=True):
            if count:
                sequence.block_table.extend(self.pool.allocate(count))
        return True

    def advance(self, chunk: ScheduledChunk) -> None:
        """Take note that a chunk was computed; blocks it filled can be shared from now on."""
        sequence, size = chunk.sequence, self.pool.block_size
        sequence.num_computed_tokens += chunk.num_tokens
        root = sequence.request.cache_root
        if root is None:
            return
        for index in range(len(sequence.content_ids), sequence.num_computed_tokens // size):
            parent = sequence.content_ids[-1] if index else root
            tokens = sequence.token_ids[index * size : (index + 1) * size]
            sequence.content_ids.append(self.pool.cache.insert(parent, tokens, sequence.block_table[index]))

    def check_integrity(self) -> None:
        """Raise RuntimeError unless queues and pool agree; with nothing running every block is free."""
        self.pool.check_integrity(sequence.block_table for sequence in self._running)
        if not self._running and self.pool.num_free != self.pool.num_blocks:
            raise RuntimeError(f"nothing runs and {self.pool.num_used} blocks are in use")
        for sequence in self._waiting:
            if sequence.block_table or sequence.num_computed_tokens:
                raise RuntimeError(f"a waiting sequence of request {sequence.request.id} holds blocks")
        for queue in (self._waiting, self._running):
            if queue != sorted(queue, key=self._rank):
                raise RuntimeError("a queue is not in the order of rank")

    def _rank(self, sequence: Sequence) -> tuple[int, int, int]:
        request = sequence.request
        return (self._urgency(sequence), request.arrival, sequence.index)

    def _urgency(self, sequence: Sequence) -> int:
        return sequence.request.priority if self.options.policy == "priority" else 0

    def _chunk(self, sequence: Sequence, draft: _Draft) -> int:
        count = min(sequence.num_uncomputed_tokens, draft.budget)
        return min(count, self._max_prompt_rows) if sequence.wants_prompt_logprobs else count

    def _continue(self, sequence: Sequence, draft: _Draft) -> None:
        count = self._chunk(sequence, draft)
        missing = self.pool.blocks_for(sequence.num_computed_tokens + count) - len(sequence.block_table)
        if missing > 0:
            while missing > self.pool.num_free:
                lowest = self._running[-1]
                if lowest is sequence:
                    return
                self._preempt(lowest, draft)
            sequence.block_table.extend(self.pool.allocate(missing))
        # Preempting others gave budget back, but the blocks are for `count` tokens.
        draft.add(sequence, count)

    def _admit(self, sequence: Sequence, draft: _Draft) -> bool:
        """Start a waiting sequence if there is a seat and room for all its known tokens; tell whether to go on."""
        request, pool = sequence.request, self.pool
        cached = []
        if request.cache_root is not None:
            cached = pool.cache.match(request.cache_root, sequence.token_ids, sequence.num_cacheable_tokens)
        missing = pool.blocks_for(len(sequence.token_ids)) - len(cached)
        available = pool.num_free - sum(pool.ref_count(block.block_id) == 0 for block in cached)
        if len(self._running) >= self._max_running or missing > available:
            return self._make_room(sequence, missing - available, draft)
        self._waiting.pop(0)
        pool.share(block.block_id for block in cached)
        sequence.block_table.extend(block.block_id for block in cached)
        sequence.block_table.extend(pool.allocate(missing))
        sequence.content_ids = [block.content_id for block in cached]
        sequence.num_computed_tokens = len(cached) * pool.block_size
        sequence.status = Status.RUNNING
        insort(self._running, sequence, key=self._rank)
        if sequence.index == 0 and request.metrics.first_scheduled_time is None:
            request.num_cached_tokens = sequence.num_computed_tokens
        draft.add(sequence, self._chunk(sequence, draft))
        return True

    def _make_room(self, sequence: Sequence, missing: int, draft: _Draft) -> bool:
        """Preempt the lowest-ranked running sequence for a strictly more urgent one, if that can ever be enough."""
        less_urgent = [other for other in self._running if self._urgency(other) > self._urgency(sequence)]
        if not less_urgent or missing > sum(self._num_exclusive(other) for other in less_urgent):
            return False
        self._preempt(less_urgent[-1], draft)
        return True

    def _num_exclusive(self, sequence: Sequence) -> int:
        return sum(self.pool.ref_count(block_id) == 1 for block_id in sequence.block_table)

    def _preempt(self, sequence: Sequence, draft: _Draft) -> None:
        draft.drop(sequence)
        self._running.remove(sequence)
        self._release(sequence)
        sequence.request.metrics.num_preemptions += 1
        self.add(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.block_table = empty_block_table()
        sequence.content_ids = []
        sequence.num_computed_tokens = 0

"""Places in one arena for all values of a step, shared by values that are not needed at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from inferencex.formats.records import record
from inferencex.runtime.backends.cpu.lowering.context import Instruction
from inferencex.runtime.backends.cpu.lowering.views import Storage, View

_ALIGNMENT = 64


@record(frozen=True, eq=False)
class MemoryPlan:
    """Where every storage of the arena begins, in bytes.

    arena_bytes:   size of the arena
    value_bytes:   what the values would take side by side
    """

    offsets: Mapping[Storage, int]
    arena_bytes: int
    value_bytes: int

    @property
    def saved_bytes(self) -> int:
        """What sharing saves."""
        return self.value_bytes - self.arena_bytes


def plan_memory(
    instructions: Sequence[Instruction],
    held: Sequence[View],
    max_tokens: int,
    max_rows: int,
    kept_until: Mapping[Storage, int] | None = None,
) -> MemoryPlan:
    """Plan the arena for steps of at most `max_tokens` and `max_rows`.

    Values of `held` (the graph's inputs) keep their place for the whole step, those of `kept_until` (what the step
    returns) from where they are made until the instruction of that number, at least. The largest values are placed
    first, each at the lowest place where none that lives at the same time lies (Pisarchyk and Lee 2020,
    arXiv:2001.03288, "greedy by size").
    """
    lives = _lives(instructions, held)
    for storage, place in (kept_until or {}).items():
        first, last = lives.get(storage, (0, place))
        lives[storage] = (first, max(last, place))
    by_extent = {
        extent: -(-max(extent.at(max_tokens, max_rows), 1) // _ALIGNMENT) * _ALIGNMENT
        for extent in {storage.nbytes for storage in lives}
    }
    sizes = {storage: by_extent[storage.nbytes] for storage in lives}
    offsets: dict[Storage, int] = {}
    taken: list[set[tuple[int, int]]] = [set() for _ in range(len(instructions) + 1)]  # offset and end, by instruction
    for storage in sorted(lives, key=lambda s: (-sizes[s], lives[s])):
        first, last = lives[storage]
        size = sizes[storage]
        place = 0
        for offset, end in sorted(set().union(*taken[first : last + 1])):
            if place + size <= offset:
                break
            if place < end:
                place = end
        offsets[storage] = place
        span = (place, place + size)
        for others in taken[first : last + 1]:
            others.add(span)
    arena = max((offsets[storage] + sizes[storage] for storage in offsets), default=0)
    return MemoryPlan(offsets, arena, sum(sizes.values()))


def _lives(instructions: Sequence[Instruction], held: Sequence[View]) -> dict[Storage, tuple[int, int]]:
    """Return the first and last instruction at which each storage of the arena is needed."""
    lives: dict[Storage, tuple[int, int]] = {}
    for view in held:
        lives[view.storage] = (0, len(instructions))
    for place, instruction in enumerate(instructions):
        for operand in (*instruction.inputs, *instruction.outputs):
            if operand is None or not operand.storage.is_arena:
                continue
            first, last = lives.get(operand.storage, (place, place))
            if last <= place:
                lives[operand.storage] = (first, place)
    return lives

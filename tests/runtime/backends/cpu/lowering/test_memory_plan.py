"""Values that live at the same time never share memory, and values that do not are made to."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from inferencex.runtime.backends.cpu.lowering.context import Instruction
from inferencex.runtime.backends.cpu.lowering.extents import Extent, Symbol
from inferencex.runtime.backends.cpu.lowering.memory_plan import plan_memory
from inferencex.runtime.backends.cpu.lowering.views import Storage, View

TOKENS, ROWS = 7, 3


def _view(nbytes: Extent) -> View:
    return View(Storage(nbytes), "u8", (nbytes,), (Extent(1),))


@st.composite
def _programs(draw: st.DrawFn) -> tuple[list[Instruction], list[View]]:
    extents = st.builds(Extent, st.integers(0, 500), st.sampled_from(Symbol))
    inputs = [_view(draw(extents)) for _ in range(draw(st.integers(1, 3)))]
    values, instructions = list(inputs), []
    for index in range(draw(st.integers(1, 12))):
        reads = draw(st.lists(st.sampled_from(values), max_size=3))
        writes = [_view(draw(extents)) for _ in range(draw(st.integers(1, 2)))]
        values += writes
        instructions.append(Instruction("Copy", str(index), tuple(reads), tuple(writes), {}))
    return instructions, [*inputs, values[-1]]


@given(_programs())
def test_living_values_do_not_overlap(program: tuple[list[Instruction], list[View]]) -> None:
    instructions, held = program
    plan = plan_memory(instructions, held, TOKENS, ROWS)
    uses: dict[Storage, list[int]] = {view.storage: [0, len(instructions)] for view in held}
    for place, instruction in enumerate(instructions):
        for view in (*instruction.inputs, *instruction.outputs):
            assert view is not None
            uses.setdefault(view.storage, []).append(place)
    spans = {
        storage: (plan.offsets[storage], plan.offsets[storage] + storage.nbytes.at(TOKENS, ROWS)) for storage in uses
    }
    assert all(start >= 0 and end <= plan.arena_bytes and start % 64 == 0 for start, end in spans.values())
    for a in uses:
        for b in uses:
            alive_together = min(uses[a]) <= max(uses[b]) and min(uses[b]) <= max(uses[a])
            if a is not b and alive_together:
                assert spans[a][1] <= spans[b][0] or spans[b][1] <= spans[a][0]
    assert plan.saved_bytes >= 0


def test_what_a_step_returns_takes_the_place_of_what_led_to_it() -> None:
    first, middle, rows, logits = (_view(Extent(nbytes)) for nbytes in (256, 256, 64, 512))
    chain = [
        Instruction("Copy", str(i), (a,), (b,), {})
        for i, (a, b) in enumerate(itertools.pairwise((first, middle, rows, logits)))
    ]
    plan = plan_memory(chain, [], TOKENS, ROWS, {logits.storage: len(chain)})
    assert plan.arena_bytes == 512 + 64
    assert plan.offsets[logits.storage] == 0
    assert plan_memory(chain, [logits], TOKENS, ROWS).arena_bytes == 512 + 512


def test_a_chain_takes_the_memory_of_two_values() -> None:
    values = [_view(Extent(64)) for _ in range(10)]
    chain = [Instruction("Copy", str(i), (a,), (b,), {}) for i, (a, b) in enumerate(itertools.pairwise(values))]
    plan = plan_memory(chain, [], TOKENS, ROWS)
    assert plan.arena_bytes == 2 * 64
    assert plan.saved_bytes == 8 * 64

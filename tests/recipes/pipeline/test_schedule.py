"""Steps run side by side where there is room, and only there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from inferencex.formats.errors import RecipeError
from inferencex.recipes.pipeline import store as store_module
from inferencex.recipes.pipeline.schedule import Room, StepResult
from inferencex.recipes.pipeline.store import Store


def most_at_once(memories: list[int], jobs: int, memory: int | None) -> tuple[int, int]:
    """Return how many steps ran at once at most, and with how much memory."""
    most, taken, highest, running = 0, 0, 0, 0

    async def step(room: Room, size: int) -> None:
        nonlocal most, taken, highest, running
        async with room.take(size):
            running, taken = running + 1, taken + size
            most, highest = max(most, running), max(highest, taken)
            for _ in range(3):
                await asyncio.sleep(0)
            running, taken = running - 1, taken - size

    async def all_steps() -> None:
        room = Room(jobs, memory)
        async with asyncio.TaskGroup() as group:
            for size in memories:
                group.create_task(step(room, size))

    asyncio.run(all_steps())
    return most, highest


def test_room() -> None:
    assert most_at_once([1] * 8, 3, None) == (3, 3)
    assert most_at_once([4, 4, 4, 4], 8, 10) == (2, 8)
    most, highest = most_at_once([20, 1, 1, 20], 8, 10)
    assert highest == 20 and most == 2, "what never fits has all of it to itself"


def test_a_work_dir_belongs_to_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_SECONDS_TO_WAIT", 0.0)
    first = Store(tmp_path)
    first.lock()
    with pytest.raises(RecipeError, match="another pipeline works there"):
        Store(tmp_path).lock()
    first.close()
    second = Store(tmp_path)
    second.lock()
    second.close()


def test_steps_at_once_give_the_same(run_recipe: Callable[..., dict[str, StepResult]]) -> None:
    matrix = ("conversions.int4.options={}", "conversions.int4.matrix={quantization: [rtn-int4, rtn-int8, none]}",
              "gates=[]", "exports=[]", "publish=[]")  # fmt: skip
    results = run_recipe(*matrix, jobs=3)
    assert {result.state for result in results.values()} == {"done"}
    digests = {result.finished.outcome.digest for result in results.values() if result.finished is not None}
    assert len(digests) == 3

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from inferencex.runtime.server.errors import Failed
from inferencex.runtime.server.openai.merged import merged


async def deltas(*values: object) -> AsyncIterator[object]:
    for value in values:
        await asyncio.sleep(0)
        if isinstance(value, Exception):
            raise value
        yield value


async def collected(*generations: AsyncIterator[object]) -> list[tuple[int, object]]:
    async with asyncio.timeout(30):
        return [item async for item in merged(cast(Any, generations))]


def test_every_delta_comes_with_its_place_and_in_order() -> None:
    found = asyncio.run(collected(deltas("a", "b"), deltas(), deltas("c")))
    assert sorted(found, key=lambda item: item[0]) == [(0, "a"), (0, "b"), (2, "c")]


@pytest.mark.parametrize("error", [Failed("the device is on fire"), ZeroDivisionError("a defect")])
def test_whatever_one_fails_with_is_raised_though_others_go_on(error: Exception) -> None:
    async def endless() -> AsyncIterator[object]:
        while True:
            await asyncio.sleep(0)
            yield "more"

    with pytest.raises(type(error), match=str(error)):
        asyncio.run(collected(endless(), deltas("a", error)))

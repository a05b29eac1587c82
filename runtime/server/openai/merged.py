"""Deltas of several generations as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from inferencex.runtime.outputs import CompletionDelta
from inferencex.runtime.server.generation import Generation


async def merged(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, CompletionDelta], None]:
    """Yield each delta with the place of its generation, as they come. Raises the first error."""
    if len(generations) == 1:
        async for delta in generations[0]:
            yield 0, delta
        return
    arrived: asyncio.Queue[tuple[int, CompletionDelta | Exception | None]] = asyncio.Queue()

    async def pump(place: int, generation: Generation) -> None:
        try:
            async for delta in generation:
                arrived.put_nowait((place, delta))
        except Exception as error:  # also a defect: otherwise the others would be waited with for ever
            arrived.put_nowait((place, error))
        arrived.put_nowait((place, None))

    pumps = [asyncio.create_task(pump(place, generation)) for place, generation in enumerate(generations)]
    try:
        left = len(pumps)
        while left:
            place, item = await arrived.get()
            if item is None:
                left -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield place, item
    finally:
        for task in pumps:
            task.cancel()

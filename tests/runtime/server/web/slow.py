"""A filter that takes its time, so that there is an answer to stop, however fast the model is."""

from __future__ import annotations

import asyncio

from inferencex.runtime.server.filters import FilterContext


class Slow:
    async def check_output(self, text: str, context: FilterContext) -> None:
        await asyncio.sleep(1.0)

"""Clients that leave: whoever is gone gets nothing computed any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from fastapi import Request
from starlette.types import Receive

from inferencex.runtime.outputs import RequestOutput
from inferencex.runtime.server.errors import ServiceError
from inferencex.runtime.server.generation import Generation


class ClientGoneError(Exception):
    """The client has closed the connection; there is nobody to answer."""


@asynccontextmanager
async def watched(receive: Receive, leave: Callable[[], object]) -> AsyncIterator[None]:
    """Call `leave` once if the client disconnects while the body of the `async with` runs."""
    inside = True

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if inside:
            leave()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        inside = False
        watcher.cancel()


async def whole(request: Request, generations: Sequence[Generation]) -> list[RequestOutput]:
    """Return the results of all generations, and close them in any case.

    Raises ClientGoneError when the client leaves first, and the error of the first generation that fails.
    """
    gone = False

    def close() -> None:
        for generation in generations:
            generation.close()

    def leave() -> None:
        nonlocal gone
        gone = True
        close()

    try:
        async with watched(request.receive, leave):
            return [await generation.result() for generation in generations]
    except ServiceError:
        if gone:
            raise ClientGoneError from None
        raise
    finally:
        close()

"""Work that takes long and cannot be interrupted, aside from the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_background(name: str, work: Callable[[], T]) -> T:
    """Run `work` on a thread of its own, and return what it returns or raise what it raises.

    The thread is a daemon: a process that is told to end does not wait for a model to be loaded, as it would for the
    threads of `asyncio.to_thread`.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def succeed(result: T) -> None:
        if not future.done():
            future.set_result(result)

    def fail(error: BaseException) -> None:
        if not future.done():
            future.set_exception(error)

    def deliver(callback: Callable[[T], None] | Callable[[BaseException], None], value: T | BaseException) -> None:
        try:
            loop.call_soon_threadsafe(callback, value)  # type: ignore[arg-type]
        except RuntimeError:  # the event loop is closed: nobody waits any more
            return

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # raised again where the result is awaited
            deliver(fail, error)
        else:
            deliver(succeed, result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future

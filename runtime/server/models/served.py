"""A version of a model that is loaded: its replicas, and who is using it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from inferencex.formats.errors import InferenceXError
from inferencex.runtime.backends.base import LosableExecutable
from inferencex.runtime.llm import LLM
from inferencex.runtime.server.engine_loop import EngineLoop
from inferencex.runtime.server.models.options import ModelOptions
from inferencex.runtime.server.models.totals import EngineTotals

_STEP_PATIENCE = 5.0
"""Seconds that a step has to end when its model is unloaded, where it can be ended at all."""


class ServedModel:
    """One version of a model, ready to serve. Used on the event loop only.

    name:      uid of the model, the same for all its versions
    version:   which one it is
    path:      folder of its bundle
    created:   when it was loaded, in seconds since 1970
    llm:       the first replica, for what all have alike: tokenizer, template, limits
    loops:     the replicas' engines, each on a thread of its own
    aliases:   further names under which the model is served
    """

    def __init__(
        self,
        name: str,
        version: str,
        path: Path,
        llms: Sequence[LLM],
        options: ModelOptions | None = None,
        aliases: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.version = version
        self.path = path
        self.llm = llms[0]
        self.options = ModelOptions() if options is None else options
        self.aliases = aliases
        self.created = int(time.time())
        self.tokenizer = self.llm.tokenizer
        self.chat_template = self.llm.chat_template
        self.max_model_len = self.llm.engine.limits.max_model_len
        self.loops = [EngineLoop(llm.shared, f"{name}@{version}/{index}") for index, llm in enumerate(llms)]
        self.started = time.monotonic()
        self._at_start = self._sum()  # the warm-up's tokens were nobody's
        self._turn = itertools.count()
        self._num_leases = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        return f"ServedModel({self.name}@{self.version}, {len(self.loops)} replicas, {self._num_leases} leases)"

    @property
    def num_leases(self) -> int:
        """How many requests hold the model now."""
        return self._num_leases

    @property
    def num_pending(self) -> int:
        """Requests that no engine computes at the moment: on their way to it, in its queue, or preempted."""
        return sum(max(loop.num_unfinished - loop.stats.num_running, 0) for loop in self.loops)

    @property
    def totals(self) -> EngineTotals:
        """What the replicas have done since the model was ready, and are doing now, summed up."""
        return self._sum().since(self._at_start)

    @property
    def failure(self) -> str | None:
        """Why no request can be answered any more, in the words of a replica; None while one of them can."""
        found = [_failure_of(loop) for loop in self.loops]
        return None if None in found else found[0]

    def start(self) -> None:
        """Start the replicas' threads; results go to the running event loop."""
        for loop in self.loops:
            loop.start()

    def stop(self, error: InferenceXError) -> None:
        """End the threads; what still runs is aborted, and its callers are told `error`.

        Waits for steps under way: not to be called on the event loop. One that takes long may wait for a process that
        hangs, and is given up where that is possible: nobody will read what it computes.
        """
        for loop in self.loops:
            executable = loop.shared.engine.executable
            if not loop.stop(_STEP_PATIENCE, error) and isinstance(executable, LosableExecutable):
                executable.abandon(f"{self.name}@{self.version} was unloaded within a step")
            loop.stop(error=error)

    def pick(self) -> EngineLoop:
        """Return the replica with the fewest unfinished requests, in turn where several have equally few.

        One that has failed for good is only picked where all have, to say so.
        """
        able = [loop for loop in self.loops if _failure_of(loop) is None] or self.loops
        first = next(self._turn) % len(able)
        return min(able[first:] + able[:first], key=lambda loop: loop.num_unfinished)

    def lease(self) -> Lease:
        """Return a hold on the model, which is not unloaded before it is released."""
        self._num_leases += 1
        self._idle.clear()
        return Lease(self)

    async def idle(self) -> None:
        """Wait until nobody holds the model."""
        await self._idle.wait()

    def _give_back(self) -> None:
        self._num_leases -= 1
        if self._num_leases == 0:
            self._idle.set()

    def _sum(self) -> EngineTotals:
        return EngineTotals.sum(EngineTotals.of(loop.stats) for loop in self.loops)


def _failure_of(loop: EngineLoop) -> str | None:
    executable = loop.shared.engine.executable
    return executable.failure if isinstance(executable, LosableExecutable) else None


class Lease:
    """A hold on a model. Release it, or use it as a context manager; releasing twice does nothing."""

    __slots__ = ("_released", "model")

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self._released = False

    def another(self) -> Lease:
        """Return one more hold on the same model."""
        return self.model.lease()

    def release(self) -> None:
        """Give the model back."""
        if not self._released:
            self._released = True
            self.model._give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

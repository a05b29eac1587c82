"""A version of a model from the wish to load it until it is gone, and how far it has come."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from inferencex.formats.errors import InferenceXError
from inferencex.runtime.server.models.memory_plan import MemoryPlan
from inferencex.runtime.server.models.options import ModelOptions
from inferencex.runtime.server.models.served import ServedModel

State = Literal["queued", "loading", "warming", "ready", "failed", "unloading"]


@dataclass(frozen=True)
class LoadRequest:
    """A bundle to load, and what to do with it once it is ready.

    uid:           name of the model
    path:          folder of the bundle, as `BundlePaths` or the operator gave it
    version:       name of the version; None: the next number
    aliases:       further names of the model; None: those it has
    replace:       take over all traffic of the versions that serve now, which are then unloaded
    keep_previous: keep what was replaced loaded, so that `rollback` is instant; None: as the registry does
    weight:        share of the traffic, 0 to 1, beside the versions that serve now; not together with `replace`
    sticky:        send each caller to the same version for as long as the weights stay; None: as it is
    required:      the server is not ready without this model
    """

    uid: str
    path: Path
    options: ModelOptions = field(default_factory=ModelOptions)
    version: str | None = None
    aliases: tuple[str, ...] | None = None
    replace: bool = False
    keep_previous: bool | None = None
    weight: float | None = None
    sticky: bool | None = None
    required: bool = False


class Version:
    """Where a version stands.

    state:        "queued" behind other loads, "loading", "warming" (a short prompt runs), "ready", "failed",
                  "unloading" (it takes no new requests, and those under way go on)
    fraction:     of the replicas, how many are loaded and warm, 0 to 1; backends do not say more
    weight:       its part of the traffic, relative to the other versions'; 0: none
    model:        set while it is loaded
    error:        why it could not be loaded
    memory:       what it takes, once that is known
    load_seconds: how long loading and warming took
    """

    def __init__(self, request: LoadRequest, name: str) -> None:
        self.request = request
        self.name = name
        self.state: State = "queued"
        self.fraction = 0.0
        self.weight = 0.0
        self.model: ServedModel | None = None
        self.error: InferenceXError | None = None
        self.memory: MemoryPlan | None = None
        self.load_seconds: float | None = None
        self._loaded = asyncio.Event()
        self._hurry = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._gone = asyncio.Event()

    @property
    def uid(self) -> str:
        """Name of the model."""
        return self.request.uid

    @property
    def is_serving(self) -> bool:
        """Whether it is ready, and gets a part of the traffic."""
        return self.state == "ready" and self.weight > 0

    @property
    def is_unloading(self) -> bool:
        """Whether it is on its way out."""
        return self.state == "unloading"

    async def loaded(self) -> ServedModel:
        """Wait until it is ready, and return the model; raises the error that it failed with."""
        await self._loaded.wait()
        if self.error is not None:
            raise self.error
        if self.model is None:
            raise InferenceXError(f"{self.uid}@{self.name} was unloaded before it was used")
        return self.model

    async def gone(self) -> None:
        """Wait until it is unloaded."""
        await self._gone.wait()

    def hurry_after(self, seconds: float) -> None:
        """Wait at most so long from now for requests under way; a limit that is sooner stays."""
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() <= loop.time() + seconds:
                return
            self._timer.cancel()
        self._timer = loop.call_later(seconds, self._hurry.set)

    async def unused(self, model: ServedModel) -> bool:
        """Wait until nobody uses the model, or the time for that is over: then False."""
        waits = [asyncio.ensure_future(model.idle()), asyncio.ensure_future(self._hurry.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        return model.num_leases == 0

    def is_ready(self, model: ServedModel, seconds: float) -> None:
        """Take over the loaded model."""
        self.model, self.load_seconds = model, seconds
        self.state, self.fraction = "ready", 1.0
        self._loaded.set()

    def has_failed(self, error: InferenceXError) -> None:
        """Remember why it could not be loaded."""
        self.state, self.error = "failed", error
        self._loaded.set()

    def is_gone(self) -> None:
        """Forget the model."""
        self.model, self.weight = None, 0.0
        if self._timer is not None:
            self._timer.cancel()
        self._loaded.set()
        self._gone.set()

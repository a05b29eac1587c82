"""Loaders without weights, whose progress a test can hold up, and callers that keep a registry busy."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inferencex.formats.errors import InferenceXError
from inferencex.runtime import LLM, SamplingParams
from inferencex.runtime.outputs import RequestOutput
from inferencex.runtime.server.engine_loop import Arrival
from inferencex.runtime.server.models.loading import LoadedReplicas, ReportProgress
from inferencex.runtime.server.models.options import ModelOptions
from inferencex.runtime.server.models.served import ServedModel


class HashLoader:
    """Loads any bundle as a model without weights. `held` keeps a load from ending until it is released."""

    def __init__(self, make_backend: Callable[[], Any]) -> None:
        self._make_backend = make_backend
        self.held: threading.Event | None = None
        self.begun = threading.Event()
        self.failure: Exception | None = None
        self.paths: list[Path] = []

    def __call__(self, path: Path, options: ModelOptions, progress: ReportProgress) -> LoadedReplicas:
        self.paths.append(path)
        self.begun.set()
        progress("loading", 0.0)
        if self.held is not None:
            assert self.held.wait(30)
        if self.failure is not None:
            raise self.failure
        llms = [LLM(path, backend=self._make_backend(), max_num_seqs=8) for _ in range(options.replicas)]
        progress("warming", 0.5)
        return LoadedReplicas(llms, options, None)


async def ask(model: ServedModel, request_id: str, max_tokens: int = 4) -> RequestOutput:
    """Have a model answer, as the service does."""
    arrived: asyncio.Future[Arrival] = asyncio.get_running_loop().create_future()
    request = model.llm.engine.prepare(request_id, [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=max_tokens))
    model.pick().submit(request, arrived.set_result, every_step=False)
    arrival = await arrived
    if isinstance(arrival, InferenceXError):
        raise arrival
    assert arrival.output is not None
    return arrival.output

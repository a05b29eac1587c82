"""The API in front of a model that says what a test tells it to, asked on the loop that it runs on."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from fastapi import FastAPI

from inferencex.runtime import LLM
from inferencex.runtime.backends.base import Float32Array
from inferencex.runtime.server import openai
from inferencex.runtime.server.access.quotas import Quotas
from inferencex.runtime.server.app import create_app
from inferencex.runtime.server.config.settings import ServerSettings, Settings
from inferencex.runtime.server.models.loading import LoadedReplicas, ReportProgress
from inferencex.runtime.server.models.options import ModelOptions
from inferencex.runtime.server.models.registry import ModelRegistry
from inferencex.runtime.server.models.version import LoadRequest
from inferencex.runtime.server.service import InferenceService, ServiceLimits

MODEL = "the-model"


class Served:
    """One application with one model.

    say(text): what the model answers from now on, then the end; otherwise it makes up its own answers
    """

    def __init__(self, llm: LLM, service: InferenceService, app: FastAPI, client: httpx.AsyncClient) -> None:
        self.llm = llm
        self.service = service
        self.app = app
        self.client = client
        self.script: list[int] | None = None

    def say(self, text: str) -> None:
        self.script = self.llm.require_tokenizer().encode(text, False)

    async def post(self, path: str, body: Any, status: int = 200) -> Any:
        """Send a body and return the JSON of the answer."""
        answer = await self.client.post(path, json=body)
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"] == "application/json"
        return answer.json()

    async def refused(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """Send a body that is refused, and return the error."""
        answer = await self.post(path, body, status)
        assert set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}
        error: dict[str, Any] = answer["error"]
        return error

    async def events(self, path: str, body: Any) -> list[Any]:
        """Send a body and return the events of the stream, the last of them "[DONE]"."""
        answer = await self.client.post(path, json={**body, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        frames = answer.text.split("\n\n")
        assert frames.pop() == "" and frames.pop() == "data: [DONE]"
        return [json.loads(frame.removeprefix("data: ")) for frame in frames]

    def transform(self, context: Sequence[int], logits: Float32Array) -> Float32Array:
        """Have the next token of the script chosen."""
        if self.script is None:
            return logits
        known = next(
            size for size in range(len(self.script), -1, -1) if context[-size:] == self.script[:size] or not size
        )
        wanted = self.script[known] if known < len(self.script) else 0
        forced = np.minimum(logits, 5.0)
        forced[wanted] = 20.0
        return forced

    def check_idle(self) -> None:
        """Nothing runs, and every block is free."""
        self.llm.engine.check_integrity()
        assert self.service.num_running == 0
        assert self.llm.stats.kv_blocks_used == 0 and not self.llm.engine.has_unfinished


Scenario = Callable[[Served], Awaitable[None]]
Serve = Callable[..., None]


def with_template(bundle: Path, folder: Path, template: str) -> Path:
    """Return a copy of a bundle with another chat template."""
    shutil.copytree(bundle, folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def serve(
    bundle: Path, scenario: Scenario, backend: Any = "auto", limits: ServiceLimits | None = None, **options: Any
) -> None:
    """Run a scenario against a bundle; afterwards nothing may be left over."""
    served: list[Served] = []

    def load(path: Path, options_: ModelOptions, progress: ReportProgress) -> LoadedReplicas:
        return LoadedReplicas([LLM(path, backend=backend, **options)], options_, None)

    async def run() -> None:
        registry = ModelRegistry(loader=load)
        model = await registry.load(LoadRequest(MODEL, bundle)).loaded()
        service = InferenceService(registry, Quotas(), limits=limits)
        settings = Settings(server=ServerSettings(send_timeout=0.2))
        app = create_app(service, settings, routers=[openai.router()])
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            served.append(Served(model.llm, service, app, client))
            if getattr(backend, "model", None) is not None:
                backend.model.transform = served[0].transform
            await scenario(served[0])
            await service.drained()
        served[0].check_idle()
        await registry.close()

    asyncio.run(run())

"""An application with only the routes of operation and administration, asked on the loop that its models run on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx

from inferencex.runtime.server import admin, health
from inferencex.runtime.server.access.keys import KeyStore
from inferencex.runtime.server.access.quotas import Quotas
from inferencex.runtime.server.app import create_app
from inferencex.runtime.server.config.keys_setting import ApiKey, key_store
from inferencex.runtime.server.config.settings import Settings
from inferencex.runtime.server.models.loading import Loader
from inferencex.runtime.server.models.registry import ModelRegistry
from inferencex.runtime.server.service import InferenceService
from inferencex.runtime.server.telemetry.metrics import Metrics

ADMIN = {"Authorization": "Bearer the-admin-key"}
USER = {"Authorization": "Bearer a-user-key"}

Scenario = Callable[[httpx.AsyncClient, InferenceService], Awaitable[None]]


def keys() -> KeyStore:
    return key_store((ApiKey(key="a-user-key"),), (ApiKey(key="the-admin-key"),))  # type: ignore[arg-type]


def operate(scenario: Scenario, loader: Loader, roots: tuple[Path, ...] = ()) -> None:
    """Run a scenario against an application whose models the loader makes."""

    async def run() -> None:
        metrics = Metrics()
        registry = ModelRegistry(roots=roots, loader=loader, observers=[metrics])
        metrics.watch(registry)
        service = InferenceService(registry, Quotas(), observers=[metrics])
        app = create_app(service, Settings(), keys(), routers=[admin.router(), health.router()])
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server", headers=ADMIN) as client:
            await scenario(client, service)
        await registry.close()

    asyncio.run(run())

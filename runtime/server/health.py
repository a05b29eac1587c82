"""Routes for those who operate a server: is it alive, is it ready, what is it doing."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel

from inferencex.runtime.server.models.registry import ModelRegistry
from inferencex.runtime.server.models.served import ServedModel
from inferencex.runtime.server.models.totals import EngineTotals
from inferencex.runtime.server.service import InferenceService
from inferencex.runtime.server.telemetry.metrics import CONTENT_TYPE, Metrics
from inferencex.runtime.server.telemetry.rates import Rate


class Health(BaseModel):
    """The process answers."""

    status: str = "ok"


class Readiness(BaseModel):
    """Whether requests should be sent here, and if not, what is missing."""

    ready: bool
    reasons: list[str]


class ModelActivity(BaseModel):
    """What the engines of a model are doing, all versions and replicas together.

    `running` and `waiting` are sequences, `pending` requests that no engine computes at the moment. The counts of
    tokens begin when a version is loaded; `prompt_tokens` and `cached_tokens` are of requests that have ended.
    `tokens_per_second` is the speed since the status was last asked for, at most over ten seconds.
    """

    name: str
    versions: list[str]
    replicas: int
    running: int
    waiting: int
    pending: int
    kv_blocks: int
    kv_blocks_used: int
    block_size: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    tokens_per_second: float
    prefix_hit_rate: float
    uptime_seconds: float


class ServerStatus(BaseModel):
    """What the server is doing, as the web page shows it. Models appear once they are loaded."""

    ready: bool
    draining: bool
    uptime_seconds: float
    requests_in_flight: int
    models: list[ModelActivity]


def service_of(request: Request) -> InferenceService:
    """Return the service of the application that a request came to."""
    service: InferenceService = request.app.state.service
    return service


Service = Annotated[InferenceService, Depends(service_of)]


def router() -> APIRouter:
    """Return the routes `/health`, `/ready`, `/metrics` and `/v1/status`."""
    routes = APIRouter(tags=["operation"])
    started = time.monotonic()
    rates: dict[str, Rate] = {}

    @routes.get("/health")
    async def health() -> Health:
        """Tell that the process is alive; engines and models are not asked."""
        return Health()

    @routes.get("/ready", responses={503: {"model": Readiness}})
    async def ready(service: Service, response: Response) -> Readiness:
        """Tell whether requests should be sent here.

        They should when every model that was asked for at the start is warm, none that serves has lost what it runs on
        for good, and the server is not shutting down.
        """
        found = readiness(service)
        if not found.ready:
            response.status_code = 503
        return found

    @routes.get("/metrics", response_class=Response, responses={200: {"content": {CONTENT_TYPE: {}}}})
    async def metrics(service: Service) -> Response:
        """Return all metrics in Prometheus' text format."""
        found = metrics_of(service)
        return Response(b"" if found is None else found.render(), media_type=CONTENT_TYPE)

    @routes.get("/v1/status")
    async def status(service: Service) -> ServerStatus:
        """Return what the server is doing now."""
        return ServerStatus(
            ready=readiness(service).ready,
            draining=service.draining,
            uptime_seconds=time.monotonic() - started,
            requests_in_flight=service.num_running,
            models=_activities(service.registry, rates),
        )

    return routes


def metrics_of(service: InferenceService) -> Metrics | None:
    """Return the metrics that observe a service; None where there are none."""
    return next((observer for observer in service.observers if isinstance(observer, Metrics)), None)


def readiness(service: InferenceService) -> Readiness:
    """Return whether requests should be sent to a service, and if not, why."""
    reasons = ["the server is shutting down"] if service.draining else []
    reasons += [f"{uid}: {why}" for uid, why in service.registry.missing.items()]
    reasons += [f"{version}: {why}" for version, why in service.registry.lost.items()]
    if not reasons and not service.registry.list():
        reasons.append("no model is loaded")
    return Readiness(ready=not reasons, reasons=reasons)


def _activities(registry: ModelRegistry, rates: dict[str, Rate]) -> list[ModelActivity]:
    by_name: dict[str, list[ServedModel]] = {}
    for model in registry.loaded():
        by_name.setdefault(model.name, []).append(model)
    for name in set(rates) - set(by_name):
        del rates[name]
    return [_activity(name, same, rates.setdefault(name, Rate())) for name, same in by_name.items()]


def _activity(name: str, versions: list[ServedModel], rate: Rate) -> ModelActivity:
    totals = EngineTotals.sum(version.totals for version in versions)
    return ModelActivity(
        name=name,
        versions=[version.version for version in versions],
        replicas=sum(len(version.loops) for version in versions),
        running=totals.running,
        waiting=totals.waiting,
        pending=sum(version.num_pending for version in versions),
        kv_blocks=totals.kv_blocks,
        kv_blocks_used=totals.kv_blocks_used,
        block_size=versions[0].llm.engine.limits.block_size,
        prompt_tokens=totals.prompt_tokens,
        cached_tokens=totals.cached_tokens,
        generated_tokens=totals.generated_tokens,
        preemptions=totals.preemptions,
        tokens_per_second=rate.per_second(totals.generated_tokens),
        prefix_hit_rate=totals.cached_tokens / totals.prompt_tokens if totals.prompt_tokens else 0.0,
        uptime_seconds=time.monotonic() - min(version.started for version in versions),
    )

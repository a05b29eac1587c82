"""The HTTP application: the routes of all parts, and around them what every request passes through."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from fastapi import APIRouter, FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from inferencex.runtime.server.access.keys import KeyStore
from inferencex.runtime.server.config.keys_setting import key_store
from inferencex.runtime.server.config.settings import ServerSettings, Settings
from inferencex.runtime.server.health import metrics_of
from inferencex.runtime.server.http_errors import ErrorBody, add_error_handlers
from inferencex.runtime.server.middleware.access_log import AccessLog
from inferencex.runtime.server.middleware.authentication import Authentication
from inferencex.runtime.server.middleware.bodies import Bodies
from inferencex.runtime.server.middleware.draining import Draining
from inferencex.runtime.server.middleware.failures import Failures
from inferencex.runtime.server.middleware.request_id import HEADER, RequestIds
from inferencex.runtime.server.middleware.security_headers import SecurityHeaders
from inferencex.runtime.server.openapi import describe
from inferencex.runtime.server.service import InferenceService


def create_app(
    service: InferenceService,
    settings: Settings,
    keys: KeyStore | None = None,
    routers: Sequence[APIRouter] | None = None,
) -> FastAPI:
    """Return the application.

    keys:    made of the settings by default
    routers: those of all parts by default

    Routes find service, settings and keys in `request.app.state`; who asks and the request's id in
    `request.state`.
    """
    options = settings.server
    store = key_store(options.api_keys, options.admin_keys) if keys is None else keys
    app = FastAPI(
        title="InferenceX",
        version=_version(),
        description="Language models over an API that is compatible with OpenAI's.",
        docs_url="/docs" if options.docs else None,
        redoc_url=None,
        openapi_url="/openapi.json" if options.docs else None,
        redirect_slashes=False,
        middleware=_middleware(service, options, store),
        responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}},
    )
    app.state.service = service
    app.state.settings = settings
    app.state.keys = store
    add_error_handlers(app)
    for router in all_routers(options) if routers is None else routers:
        app.include_router(router)
    describe(app, needs_key=store.required)
    return app


def all_routers(options: ServerSettings) -> list[APIRouter]:
    """Return the routes of every part that the settings ask for."""
    from inferencex.runtime.server import admin, health, openai, web, websocket

    routers = [openai.router(), admin.router(), health.router(), websocket.router()]
    return [*routers, web.router()] if options.page else routers


def _middleware(service: InferenceService, options: ServerSettings, keys: KeyStore) -> list[Middleware]:
    """Return what a request passes through, the outermost first."""
    layers = [
        Middleware(RequestIds),
        Middleware(AccessLog, metrics=metrics_of(service), log=options.access_log),
        Middleware(SecurityHeaders, cross_origin=bool(options.cors_origins)),
        Middleware(Draining, is_draining=lambda: service.draining),
        Middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[HEADER, "Retry-After"],
        )
        if options.cors_origins
        else None,
        Middleware(Failures, send_timeout=options.send_timeout),
        Middleware(Authentication, keys=keys, protect=options.protect),
        Middleware(
            Bodies,
            max_bytes=options.max_body_bytes,
            max_depth=options.max_json_depth,
            timeout=options.body_timeout,
        ),
    ]
    return [layer for layer in layers if layer is not None]


def _version() -> str:
    try:
        return version("inferencex")
    except PackageNotFoundError:
        return "0"

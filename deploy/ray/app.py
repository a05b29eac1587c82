"""A bundle on several machines: Ray Serve runs replicas of the server's own HTTP application, and adds more under load.

    PYTHONPATH=deploy/ray serve run deploy/ray/serve.yaml

Each replica is a process with a model of its own, which answers as `inferencex serve` does, streams and WebSocket
included. Ray starts and replaces replicas, spreads requests over them, and decides how many there are. `args` in
serve.yaml are settings by their place (`model.path`); `config` names a file that holds more of them. They are read
where a replica runs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application
from starlette.applications import Starlette
from starlette.routing import Mount

from inferencex.formats.errors import OptionError
from inferencex.runtime.server.app import create_app
from inferencex.runtime.server.config.catalogue import by_path
from inferencex.runtime.server.config.layers import suggest
from inferencex.runtime.server.config.load import load_settings
from inferencex.runtime.server.config.settings import Settings
from inferencex.runtime.server.filters import load_filters
from inferencex.runtime.server.models.registry import ModelRegistry
from inferencex.runtime.server.run import make_service
from inferencex.runtime.server.startup import check, load_requests
from inferencex.runtime.server.telemetry.logs import configure_logging
from inferencex.runtime.server.telemetry.metrics import Metrics


def application(args: Mapping[str, Any]) -> Application:
    """Return the application that serve.yaml names. Raises OptionError for arguments that are no settings."""
    check_names(args)
    factory = application_factory(dict(args))

    @serve.deployment(name="Bundle")
    @serve.ingress(factory)
    class Bundle:
        """A replica; all that it does is in the HTTP application."""

    return Bundle.bind()  # type: ignore[attr-defined]


def check_names(args: Mapping[str, Any]) -> None:
    """Raise OptionError for a name that is no setting."""
    for name in args:
        if name != "config" and name not in by_path():
            raise OptionError(f"args of serve.yaml: there is no setting {name!r}{suggest(name, list(by_path()))}")


def replica_settings(args: Mapping[str, Any]) -> Settings:
    """Return the settings of a replica. Raises OptionError for those that it cannot have, or that are wrong."""
    flags = {name: value for name, value in args.items() if name != "config"}
    config = args.get("config")
    settings = load_settings(flags, os.environ, None if config is None else Path(config)).settings
    check(settings)
    if not settings.model.path:
        raise OptionError("model.path is not set; a replica serves the bundles it is started with")
    if settings.server.admin_keys:
        raise OptionError(
            "server.admin_keys is set, and what an administrator does would reach one replica of several; leave the "
            "keys out, and change serve.yaml to change what is served"
        )
    return settings


def application_factory(args: Mapping[str, Any]) -> Callable[[], Starlette]:
    """Return the function that Ray calls in each replica for its HTTP application."""

    def make_application() -> Starlette:
        settings = replica_settings(args)
        options = settings.server
        configure_logging(options.log_format, options.log_level)
        metrics = Metrics()
        registry = ModelRegistry(observers=[metrics])
        metrics.watch(registry)
        service = make_service(settings, registry, metrics, load_filters(options.filters))

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            versions = [registry.load(request) for request in load_requests(settings)]
            await asyncio.gather(*(version.loaded() for version in versions))
            yield
            service.begin_drain()
            await service.drained(options.drain_timeout)
            await registry.close()

        return Starlette(routes=[Mount("/", create_app(service, settings))], lifespan=lifespan)

    return make_application

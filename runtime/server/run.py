"""A server from its start to its end: everything in one process, on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import uvicorn

from inferencex.formats.errors import InferenceXError
from inferencex.runtime.server.access.keys import KeyStore
from inferencex.runtime.server.access.quotas import Quotas
from inferencex.runtime.server.allocator import limit_arenas
from inferencex.runtime.server.app import create_app
from inferencex.runtime.server.calls import CallerLimits, Observer
from inferencex.runtime.server.config.keys_setting import key_store
from inferencex.runtime.server.config.settings import ServerSettings, Settings
from inferencex.runtime.server.filters import Filters, load_filters
from inferencex.runtime.server.grpc.server import GrpcServer, start_grpc
from inferencex.runtime.server.http_protocol import protocol_class
from inferencex.runtime.server.listen import address_of, bind, refuse_connections, tls_factory
from inferencex.runtime.server.models.registry import ModelRegistry
from inferencex.runtime.server.service import InferenceService, ServiceLimits
from inferencex.runtime.server.startup import check, describe, load_requests, notes
from inferencex.runtime.server.telemetry.logs import RequestLog, configure_logging
from inferencex.runtime.server.telemetry.metrics import Metrics
from inferencex.runtime.server.telemetry.tracing import RequestTraces, open_traces

_LOG = logging.getLogger("inferencex.server")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PROGRESS_EVERY = 10.0  # seconds
_ABORT_SECONDS = 5.0  # for clients to be told that their request was ended
_LINGER = 0.25  # seconds in which connections that are there already are still answered, after the last request


@dataclass(frozen=True)
class Running:
    """A server that listens, for the program that it is part of.

    stop: begin to drain; called on the event loop
    """

    address: str
    loop: asyncio.AbstractEventLoop
    service: InferenceService
    stop: Callable[[], None]


class Embedder(Protocol):
    """The program that a server is part of. Its methods are called on the server's event loop."""

    def listening(self, running: Running) -> None:
        """The server listens, and begins to load its models."""

    def ready(self) -> None:
        """All models are loaded."""


def serve(settings: Settings, embedder: Embedder | None = None) -> None:
    """Serve until a signal says to stop; returns when everything has ended.

    With an `embedder`, signals, logging and the allocator are left to it, and it says when to stop.

    SIGTERM or SIGINT begins to drain: new requests are refused with 503, running ones get `drain_timeout` to finish and
    are then ended. A second signal ends the process at once. Raises InferenceXError for settings, files, ports and
    bundles that cannot be served.
    """
    options = settings.server
    check(settings)
    if embedder is None:
        limit_arenas()
        configure_logging(options.log_format, options.log_level)
    keys, filters = key_store(options.api_keys, options.admin_keys), load_filters(options.filters)
    for note in notes(settings):
        _LOG.warning("%s", note)
    traces = None if options.otlp_endpoint is None else open_traces(options.otlp_endpoint)
    tls = tls_factory(options)
    with contextlib.closing(bind(options)) as bound:
        try:
            config = _uvicorn_config(options, tls)
            with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
                runner.run(Server(settings, keys, filters, traces, bound, config, embedder).run())
        finally:
            if options.uds is not None:
                options.uds.unlink(missing_ok=True)
            if traces is not None:
                traces.shutdown()


class HttpServer(uvicorn.Server):
    """uvicorn's server, which leaves signals to us and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        self.listening.set()


class Server:
    """The parts of a server, started in order and ended in the opposite order."""

    def __init__(
        self,
        settings: Settings,
        keys: KeyStore,
        filters: Filters,
        traces: RequestTraces | None,
        bound: socket.socket,
        config: uvicorn.Config,
        embedder: Embedder | None = None,
    ) -> None:
        self._settings = settings
        self._embedder = embedder
        self._keys = keys
        self._filters = filters
        self._traces = traces
        self._bound = bound
        self._config = config
        self._stop = asyncio.Event()
        self._began = time.monotonic()
        self._grpc: GrpcServer | None = None

    async def run(self) -> None:
        """Serve until told to stop."""
        metrics = Metrics()
        registry = ModelRegistry(roots=self._settings.model.root, observers=[metrics])
        metrics.watch(registry)
        service = make_service(self._settings, registry, metrics, self._filters, self._traces)
        app = create_app(service, self._settings, self._keys)
        self._config.app = app
        http = HttpServer(self._config)
        if self._embedder is None:
            self._catch_signals()
        serving = asyncio.create_task(http.serve(sockets=[self._bound]))
        try:
            await self._until(http.listening.wait(), serving)
            if self._embedder is not None:
                address = address_of(self._bound, self._settings.server)
                self._embedder.listening(Running(address, asyncio.get_running_loop(), service, self._stop.set))
            if self._settings.server.grpc_port is not None:
                self._grpc = await start_grpc(service, self._settings, self._keys)
            work: list[Coroutine[Any, Any, Any]] = [self._load(registry)]
            if self._settings.server.docs:  # made now, for it takes longer than other requests should wait
                work.append(asyncio.to_thread(app.openapi))
            await self._until(asyncio.gather(*work), serving)
            if self._embedder is not None and not self._stop.is_set():
                self._embedder.ready()
            await self._until(self._stop.wait(), serving)
            await self._drain(service)
        finally:
            await self._end(registry, http, serving)

    async def _load(self, registry: ModelRegistry) -> None:
        """Load the models of the configuration; /health is answered meanwhile, and /ready says how far it is."""
        address = address_of(self._bound, self._settings.server)
        _LOG.info("listening on %s; loading", address)
        versions = [registry.load(request) for request in load_requests(self._settings)]
        report = asyncio.create_task(_report_progress(registry))
        try:
            for version in versions:
                model = await version.loaded()
                for line in describe(model):
                    _LOG.info("%s", line)
        finally:
            report.cancel()
        keys = f"{len(self._keys)} keys" if self._keys.required else "no key needed"
        _LOG.info("ready after %.1f s on %s (%s)", time.monotonic() - self._began, address, keys)

    async def _until(self, work: Awaitable[Any], serving: asyncio.Task[None]) -> None:
        """Wait for something to be done, or for a signal; raises what either it or the HTTP server fails with."""
        task = asyncio.ensure_future(work)
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait({task, stop, serving}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if task.done():
            task.result()
            return
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        if serving.done():
            serving.result()
            raise InferenceXError("the HTTP server ended by itself; its log says why")

    async def _drain(self, service: InferenceService) -> None:
        """Let what runs finish, and refuse what comes."""
        timeout = self._settings.server.drain_timeout
        _LOG.info("told to stop: %d requests are under way and have %g s to finish", service.num_running, timeout)
        service.begin_drain()
        if self._grpc is not None:
            self._grpc.begin_drain()
        if not await service.drained(timeout):
            _LOG.warning("%d requests did not finish within %g s and are ended", service.num_running, timeout)
            service.end_all()
            await service.drained(_ABORT_SECONDS)
        refuse_connections(self._bound)
        await asyncio.sleep(_LINGER)

    async def _end(self, registry: ModelRegistry, http: HttpServer, serving: asyncio.Task[None]) -> None:
        http.should_exit = True
        with contextlib.suppress(asyncio.CancelledError, Exception):  # what it failed with has been raised
            await serving
        if self._grpc is not None:
            await self._grpc.stop(_ABORT_SECONDS)
        await registry.close()
        _LOG.info("stopped")

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._signalled, number)

    def _signalled(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            _LOG.warning("told to stop once more: ending at once")
            os._exit(128 + number)
        self._stop.set()


def make_service(
    settings: Settings,
    registry: ModelRegistry,
    metrics: Metrics,
    filters: Filters | None = None,
    traces: RequestTraces | None = None,
) -> InferenceService:
    """Return a service with the limits that the settings give it, whose requests are logged and counted."""
    options = settings.server
    observers: list[Observer] = [metrics, RequestLog(log_prompts=options.log_prompts)]
    if traces is not None:
        observers.append(traces)
    return InferenceService(
        registry,
        Quotas(CallerLimits(options.concurrent_per_key, options.requests_per_minute, options.tokens_per_minute)),
        limits=ServiceLimits(
            max_queue=options.max_queue,
            max_n=options.max_n,
            max_prompt_tokens=options.max_prompt_tokens,
            max_prompts=options.max_prompts,
            request_timeout=options.request_timeout,
            stream_interval=options.stream_interval,
        ),
        filters=filters,
        observers=observers,
    )


def _uvicorn_config(options: ServerSettings, tls: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app="",  # set once the loop runs
        http=protocol_class(options.body_timeout),
        lifespan="off",
        log_config=None,
        log_level=options.log_level if options.log_level == "debug" else "warning",
        access_log=False,
        server_header=False,
        proxy_headers=bool(options.trusted_proxies),
        forwarded_allow_ips=list(options.trusted_proxies),
        ws_max_size=options.max_body_bytes,
        backlog=options.backlog,
        timeout_keep_alive=options.keep_alive_timeout,
        timeout_graceful_shutdown=int(_ABORT_SECONDS),
        ssl_certfile=options.tls_certificate,
        ssl_keyfile=options.tls_key,
        ssl_context_factory=tls,
    )


async def _report_progress(registry: ModelRegistry) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_EVERY)
        for deployment in registry.deployments:
            for version in deployment.versions.values():
                if version.state in ("loading", "warming"):
                    _LOG.info("%s is still %s (%d %%)", version.uid, version.state, int(100 * version.fraction))

"""The gRPC server: started and stopped beside the HTTP server, in the same process and on the same event loop."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from inferencex.formats.errors import OptionError
from inferencex.runtime.server.access.keys import KeyStore
from inferencex.runtime.server.config.settings import ServerSettings, Settings
from inferencex.runtime.server.grpc.health import HealthServicer
from inferencex.runtime.server.grpc.interceptors import DecodingInterceptor, KeyInterceptor
from inferencex.runtime.server.grpc.servicer import InferenceServicer
from inferencex.runtime.server.grpc.v1 import inference_pb2 as pb
from inferencex.runtime.server.grpc.v1 import inference_pb2_grpc
from inferencex.runtime.server.health import readiness
from inferencex.runtime.server.service import InferenceService

_LOG = logging.getLogger(__name__)

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name

_MAX_METADATA_BYTES = 16 << 10
_KEEPALIVE_MS = 30_000  # a client that is silently gone is noticed after this time and the next
_KEEPALIVE_TIMEOUT_MS = 20_000
_MIN_PING_INTERVAL_MS = 10_000  # clients may ask for signs of life this often


class GrpcServer:
    """A gRPC server that is listening.

    port: where; the one the system chose, when it was asked to
    """

    def __init__(self, server: grpc.aio.Server, health_servicer: HealthServicer, port: int) -> None:
        self._server = server
        self._health = health_servicer
        self.port = port

    def begin_drain(self) -> None:
        """Say NOT_SERVING from now on. Calls under way go on; the service decides about new ones."""
        self._health.stop()

    async def stop(self, grace: float | None = None) -> None:
        """Take no more calls, and cancel those that still run after `grace` seconds; None: at once."""
        self._health.stop()
        await self._server.stop(grace)


async def start_grpc(service: InferenceService, settings: Settings, keys: KeyStore) -> GrpcServer:
    """Listen on `server.host` and `server.grpc_port`, over TLS where HTTP is, and return the server.

    The health service answers what `/ready` does, so it can listen while models load. To end: `begin_drain`
    when the service begins to drain, `stop` when it has drained. Raises OptionError when there is no port to
    listen on, it is taken, or a TLS file cannot be read.
    """
    options = settings.server
    if options.grpc_port is None:
        raise OptionError("server.grpc_port is not set; gRPC needs a port of its own (0 picks a free one)")
    server = grpc.aio.server(
        interceptors=[KeyInterceptor(keys, _protected(options)), DecodingInterceptor(f"/{SERVICE_NAME}/")],
        options=[
            ("grpc.max_receive_message_length", options.max_body_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
            ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
            ("grpc.so_reuseport", 0),  # a port that is taken is an error
        ],
    )
    servicer = InferenceServicer(service, keys, options.send_timeout)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    health_servicer = HealthServicer(lambda: readiness(service).ready, (SERVICE_NAME,))
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    if options.docs:
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    port = _listen(server, options, options.grpc_port)
    await server.start()
    _LOG.info("gRPC listens on %s", _address(options.host, port))
    return GrpcServer(server, health_servicer, port)


def _protected(options: ServerSettings) -> tuple[str, ...]:
    """Return the methods that need a key as HTTP's counterparts of them do."""
    prefixes = {"health": f"/{health.SERVICE_NAME}/", "docs": f"/{reflection.SERVICE_NAME}/"}
    return tuple(prefix for name, prefix in prefixes.items() if name in options.protect)


def _listen(server: grpc.aio.Server, options: ServerSettings, port: int) -> int:
    address = _address(options.host, port)
    credentials = _credentials(options)
    try:
        if credentials is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, credentials))
    except RuntimeError as error:
        raise OptionError(
            f"gRPC cannot listen on {address}; choose another server.grpc_port, or an address of this machine"
        ) from error


def _credentials(options: ServerSettings) -> Any:
    if options.tls_certificate is None or options.tls_key is None:
        return None
    chain = _read("tls_certificate", options.tls_certificate)
    key = _read("tls_key", options.tls_key)
    if options.tls_client_ca is None:
        return grpc.ssl_server_credentials([(key, chain)])
    roots = _read("tls_client_ca", options.tls_client_ca)
    return grpc.ssl_server_credentials([(key, chain)], root_certificates=roots, require_client_auth=True)


def _read(option: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise OptionError(f"server.{option}: {path} cannot be read: {error.strerror or error}") from error


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

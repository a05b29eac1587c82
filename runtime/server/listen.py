"""The socket and certificate of the HTTP server: what is wrong with them is said in one line, before anything loads."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import ssl
import stat
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inferencex.formats.errors import OptionError
from inferencex.runtime.server.config.settings import ServerSettings

_SO_ATTACH_FILTER = 26  # of Linux, which Python has no name for
_BPF_RETURN = 0x06  # how many bytes of the packet to let through


def bind(options: ServerSettings) -> socket.socket:
    """Return a socket that is bound to where the settings say, and does not listen yet. Raises OptionError."""
    return _bind_unix(options.uds) if options.uds is not None else _bind_tcp(options.host, options.port)


def address_of(bound: socket.socket, options: ServerSettings) -> str:
    """Return the address as one would type it."""
    if options.uds is not None:
        return f"unix:{options.uds}"
    scheme = "http" if options.tls_certificate is None else "https"
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"{scheme}://{host}:{bound.getsockname()[1]}"


def tls_factory(options: ServerSettings) -> Callable[[Any, Any], ssl.SSLContext] | None:
    """Return what makes uvicorn's TLS context, None without TLS. Raises OptionError for files that are no good."""
    certificate, key, client_ca = options.tls_certificate, options.tls_key, options.tls_client_ca
    if certificate is None or key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for option, path in (("tls_certificate", certificate), ("tls_key", key), ("tls_client_ca", client_ca)):
        if path is not None:
            _check_readable(option, path)
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise OptionError(f"server.tls_certificate {certificate} with server.tls_key {key}: {_why(error)}") from error
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except (ssl.SSLError, OSError) as error:
            raise OptionError(f"server.tls_client_ca {client_ca}: {_why(error)}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return lambda _config, _default: context


def refuse_connections(bound: socket.socket) -> None:
    """Have the system ignore whoever wants to connect from now on, while connections that wait can be accepted.

    Closing a socket resets the connections that wait on it, and the requests in them would be lost. Linux can do this,
    with a packet filter that lets nothing through; elsewhere those few are lost.
    """
    if sys.platform != "linux" or bound.family == socket.AF_UNIX:
        return
    program = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 0), 8)
    with contextlib.suppress(OSError):  # of systems that allow no filters
        bound.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


def _bind_tcp(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise OptionError(f"server.host {host!r} is no address of this machine: {_why(error)}") from error
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(place)
        bound.listen()  # here, for a port may be bound twice and only listened on once
    except OSError as error:
        bound.close()
        hint = "; choose another server.port, or 0 for a free one" if error.errno == errno.EADDRINUSE else ""
        raise OptionError(f"cannot listen on {host} port {port}: {_why(error)}{hint}") from error
    return bound


def _bind_unix(path: Path) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            _check_abandoned(path)
            path.unlink()
        bound.bind(os.fspath(path))
        bound.listen()
    except OSError as error:
        bound.close()
        raise OptionError(f"cannot listen on server.uds {path}: {_why(error)}") from error
    return bound


def _check_abandoned(path: Path) -> None:
    """Raise OptionError for a socket file that another server answers on; what a crash left behind is no hindrance."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return
    raise OptionError(f"cannot listen on server.uds {path}: another server does")


def _check_readable(option: str, path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise OptionError(f"server.{option} {path}: {_why(error)}") from error


def _no_password() -> str:
    raise ValueError("the key is encrypted, and there is nobody to ask for its password; decrypt it first")


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)

"""Who calls, and what else a call's metadata says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inferencex.runtime.server.access.keys import KeyStore
from inferencex.runtime.server.calls import Caller
from inferencex.runtime.server.grpc.status import Context
from inferencex.runtime.server.middleware.request_id import request_id_for
from inferencex.runtime.server.openai.context import TRACE_HEADERS

REQUEST_ID = "x-request-id"


@dataclass(frozen=True)
class Incoming:
    """What is known of a call before its message is looked at.

    timeout: seconds until the client's deadline; None when it has none
    """

    caller: Caller
    request_id: str
    timeout: float | None
    trace_headers: dict[str, str]


async def receive(context: Context, keys: KeyStore) -> Incoming:
    """Authenticate a call, and answer with its request id. Raises NotAuthenticated."""
    metadata = texts(context.invocation_metadata())
    request_id = request_id_for(metadata.get(REQUEST_ID))
    await context.send_initial_metadata(((REQUEST_ID, request_id),))
    return Incoming(
        caller=keys.authenticate(metadata.get("authorization")),
        request_id=request_id,
        timeout=context.time_remaining(),
        trace_headers={name: metadata[name] for name in TRACE_HEADERS if name in metadata},
    )


def texts(metadata: Any) -> dict[str, str]:
    """Return a call's metadata, less binary values."""
    return {name: value for name, value in metadata or () if isinstance(value, str)}

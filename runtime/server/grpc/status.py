"""How a call fails: the service's errors as status codes, with their details in the trailing metadata."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeAlias

import grpc

from inferencex.runtime.server import errors
from inferencex.runtime.server.errors import ServiceError

_LOG = logging.getLogger(__name__)

Context: TypeAlias = Any  # grpc.aio.ServicerContext, of which there are no types
Metadata: TypeAlias = tuple[tuple[str, str], ...]

_CODES: tuple[tuple[type[ServiceError], grpc.StatusCode], ...] = (
    (errors.InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.TooLarge, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.NotAuthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (errors.Forbidden, grpc.StatusCode.PERMISSION_DENIED),
    (errors.ModelNotFound, grpc.StatusCode.NOT_FOUND),
    (errors.Conflict, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.TooManyRequests, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.Unavailable, grpc.StatusCode.UNAVAILABLE),
    (errors.TimedOut, grpc.StatusCode.DEADLINE_EXCEEDED),
)


def status_code(error: ServiceError) -> grpc.StatusCode:
    """Return the status code of an error; INTERNAL for what is the server's own fault."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def error_metadata(error: ServiceError) -> Metadata:
    """Return what the trailing metadata says of an error: its type, code, field, and when to try again."""
    entries = [("inferencex-error-type", error.type)]
    if error.code is not None:
        entries.append(("inferencex-error-code", error.code))
    if error.param is not None:
        entries.append(("inferencex-error-param", _ascii(error.param)))
    if error.retry_after is not None:
        entries.append(("retry-after", str(math.ceil(error.retry_after))))
        # What clients with a retry policy wait before they try again by themselves.
        entries.append(("grpc-retry-pushback-ms", str(math.ceil(error.retry_after * 1000))))
    return tuple(entries)


async def fail(context: Context, error: ServiceError) -> NoReturn:
    """End a call with an error."""
    await context.abort(status_code(error), str(error), error_metadata(error))
    raise AssertionError("abort raises")


@asynccontextmanager
async def answered(context: Context) -> AsyncIterator[None]:
    """End the call with the status that an error of the block stands for."""
    try:
        yield
    except ServiceError as error:
        await fail(context, error)
    except grpc.aio.AbortError:
        raise
    except Exception:  # a defect; the client is told no more than that, and the log everything
        _LOG.exception("a gRPC call failed")
        await fail(context, errors.Failed("the server failed to serve the call; its log says why"))


def _ascii(text: str) -> str:
    """Return the text as metadata may hold it: printable ASCII."""
    return "".join(character if " " <= character <= "~" else "?" for character in text)

"""What happens to a call before its method is reached."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from inferencex.runtime.server.access.keys import KeyStore
from inferencex.runtime.server.errors import InvalidRequest, NotAuthenticated, ServiceError
from inferencex.runtime.server.grpc.access import texts
from inferencex.runtime.server.grpc.status import Context, fail

_Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]

_MAKERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Asks for a key on methods that would answer anyone.

    prefixes: of the methods, such as "/grpc.health.v1.Health/"
    """

    def __init__(self, keys: KeyStore, prefixes: tuple[str, ...]) -> None:
        self._keys = keys
        self._prefixes = prefixes

    async def intercept_service(self, continuation: _Continuation, details: grpc.HandlerCallDetails) -> Any:
        """Return the method's handler, or one that refuses the call."""
        handler = await continuation(details)
        if handler is None or not details.method.startswith(self._prefixes):
            return handler
        try:
            self._keys.authenticate(texts(details.invocation_metadata).get("authorization"))
        except NotAuthenticated as error:
            return _refusing(handler, error)
        return handler


class DecodingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Answers bytes that are no message with INVALID_ARGUMENT; gRPC alone would call that a failure of the server.

    prefix: of the methods, all of which take one message
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    async def intercept_service(self, continuation: _Continuation, details: grpc.HandlerCallDetails) -> Any:
        """Return a handler that decodes the message by itself."""
        handler = await continuation(details)
        if handler is None or not details.method.startswith(self._prefix):
            return handler
        method = handler.unary_stream if handler.response_streaming else handler.unary_unary

        async def decode(data: bytes, context: Context) -> Any:
            try:
                message = handler.request_deserializer(data)
            except DecodeError as error:
                await fail(context, InvalidRequest(f"the request cannot be decoded: {error}"))
            return await method(message, context)

        make = _MAKERS[False, handler.response_streaming]
        return make(decode, None, handler.response_serializer)


def _refusing(handler: Any, error: ServiceError) -> Any:
    async def refuse(request: Any, context: Context) -> None:
        await fail(context, error)

    make = _MAKERS[handler.request_streaming, handler.response_streaming]
    return make(refuse, handler.request_deserializer, handler.response_serializer)

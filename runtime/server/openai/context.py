"""What a handler knows of its request, beside the body: the service, who asks, the request's id."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from fastapi import Request

from inferencex.runtime.server.calls import ANONYMOUS, Caller
from inferencex.runtime.server.errors import InvalidRequest
from inferencex.runtime.server.models.served import ServedModel
from inferencex.runtime.server.service import InferenceService
from inferencex.runtime.text.tokenizer import Tokenizer

TRACE_HEADERS = ("traceparent", "tracestate")


@dataclass(frozen=True)
class Context:
    """The surroundings of one request.

    trace_headers: what a client sent to have the request traced
    """

    service: InferenceService
    caller: Caller
    request_id: str
    trace_headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Request) -> Context:
        """Read them off the application and what its middleware noted."""
        headers = request.headers
        return cls(
            service=request.app.state.service,
            caller=getattr(request.state, "caller", ANONYMOUS),
            request_id=getattr(request.state, "request_id", None) or secrets.token_hex(16),
            trace_headers={name: headers[name] for name in TRACE_HEADERS if name in headers},
        )

    def model(self, name: str | None) -> ServedModel:
        """Return the model a request is for, to learn of its tokenizer and template. Raises ModelNotFound."""
        with self.service.registry.resolve(name, self.caller) as lease:
            return lease.model


def require_tokenizer(model: ServedModel, param: str) -> Tokenizer:
    """Return a model's tokenizer. Raises InvalidRequest, blaming the field `param`, when it has none."""
    if model.tokenizer is None:
        raise InvalidRequest(
            f"the model {model.name!r} has no tokenizer, so it takes and gives token ids only; leave {param} out",
            param=param,
        )
    return model.tokenizer

"""Errors as HTTP answers: whatever goes wrong, the body has OpenAI's shape."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from inferencex.formats.errors import InferenceXError
from inferencex.runtime.server.errors import Failed, InvalidRequest, NotAuthenticated, ServiceError, body, told

_LOG = logging.getLogger(__name__)

_SHOWN_PROBLEMS = 3  # of a body in which several fields are wrong


class UnknownPath(ServiceError):
    """Nothing is served there."""

    status = 404
    type = "not_found_error"
    default_code = "unknown_path"


class WrongMethod(ServiceError):
    """The path takes other methods."""

    status = 405
    type = "invalid_request_error"
    default_code = "method_not_allowed"


class SlowRequest(ServiceError):
    """The client took too long to send its request."""

    status = 408
    type = "timeout_error"
    default_code = "request_timeout"


class ErrorDetail(BaseModel):
    """What went wrong. `param` is the field of the request that is to blame."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail


def error_response(error: ServiceError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return the answer that tells a client of an error; `Retry-After` is in whole seconds, rounded up."""
    fields = dict(headers or {})
    if error.retry_after is not None:
        fields["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    if isinstance(error, NotAuthenticated):
        fields["WWW-Authenticate"] = "Bearer"
    return JSONResponse(body(error), status_code=error.status, headers=fields)


def add_error_handlers(app: FastAPI) -> None:
    """Have every error of the routes answered in OpenAI's shape."""
    app.add_exception_handler(InferenceXError, _on_our_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_body)
    app.add_exception_handler(HTTPException, _on_http_error)


async def _on_our_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, InferenceXError)
    answer = told(error)
    if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR and answer.status != HTTPStatus.SERVICE_UNAVAILABLE:
        request_id = getattr(request.state, "request_id", "")
        _LOG.error("%s", answer, extra={"event": "failed", "fields": {"request_id": request_id}})
    return error_response(answer)


async def _on_invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(describe_invalid(error.errors()))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    answer: ServiceError
    if error.status_code == HTTPStatus.NOT_FOUND:
        answer = UnknownPath(f"there is nothing at {path[:200]!r}; the paths are listed at /docs")
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "other methods")
        answer = WrongMethod(f"{path} takes {allowed}, not {request.method}")
    elif error.status_code < HTTPStatus.INTERNAL_SERVER_ERROR:
        answer = InvalidRequest(str(error.detail))
    else:
        answer = Failed(str(error.detail))
    return error_response(answer, error.headers)


def describe_invalid(problems: Any) -> InvalidRequest:
    """Return what a client is told of a body, path or query that does not fit, from pydantic's list of problems."""
    found: list[str] = []
    for problem in problems:
        if problem["type"] == "json_invalid":
            reason = problem.get("ctx", {}).get("error", "it ends too early")
            return InvalidRequest(f"the body is not JSON: {reason} (at character {problem['loc'][-1]})")
        place = _param(problem["loc"])
        reason = problem["msg"].removeprefix("Value error, ")
        found.append(f"{place}: {reason}" if place else f"the body: {reason}")
    found = list(dict.fromkeys(found))
    more = f"; and {len(found) - _SHOWN_PROBLEMS} more" if len(found) > _SHOWN_PROBLEMS else ""
    return InvalidRequest("; ".join(found[:_SHOWN_PROBLEMS]) + more, param=_param(problems[0]["loc"]) or None)


def _param(place: tuple[str | int, ...]) -> str:
    """Return a place in a request as a client writes it; where it is (body, path, query) is left out."""
    return ".".join(map(str, place[1:]))

"""How the API's routes read bodies: strict JSON, and every mistake in it as a 400 that names the field."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic_core import from_json

from inferencex.runtime.server.openai.validation import invalid_request

_MOST_ERRORS = 64  # that are looked at, to tell of one


class _StrictRequest(Request):
    """Reads JSON as the standard has it: UTF-8, no NaN, no nesting without end, numbers of any size."""

    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from error


class StrictRoute(APIRoute):
    """A route whose handler raises InvalidRequest for a body that is not what its model says."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler, with its errors translated."""
        handle = super().get_route_handler()
        model = None if self.body_field is None else self.body_field.field_info.annotation

        async def handler(request: Request) -> Response:
            try:
                return await handle(_StrictRequest(request.scope, request.receive))
            except RequestValidationError as error:
                raise invalid_request(error.errors()[:_MOST_ERRORS], model) from error

        return handler

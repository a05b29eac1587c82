"""With which statuses errors come, for the API's description."""

from __future__ import annotations

from typing import Any

from inferencex.runtime.server.http_errors import ErrorBody

_MEANINGS = {
    400: "The request is malformed, or asks for what this model cannot do.",
    401: "The API key is missing or wrong.",
    403: "The key does not allow this.",
    404: "No model of that name is served.",
    413: "The body is larger than this server takes.",
    429: "The queue or one of the key's quotas is full; see the header Retry-After.",
    500: "The backend failed.",
    503: "The server is starting or shutting down; see the header Retry-After.",
    504: "The request took longer than it was given.",
}

ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    **{status: {"model": ErrorBody, "description": meaning} for status, meaning in _MEANINGS.items()},
    "4XX": {"model": ErrorBody, "description": "The request cannot be served as it is."},
}
"""For the `responses` of a route. The last one also keeps FastAPI from adding its own form of 422."""

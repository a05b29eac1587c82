"""The description of the API at /openapi.json, made to say what the server does."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from inferencex.runtime.server.middleware.authentication import API

_SCHEME = "key"


def describe(app: FastAPI, needs_key: bool) -> None:
    """Correct an application's description: wrong bodies get 400, never 422, and some paths need a key."""
    build = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _corrected(build(), needs_key)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _corrected(document: dict[str, Any], needs_key: bool) -> dict[str, Any]:
    for path, operations in document.get("paths", {}).items():
        is_api = any(path == place or path.startswith(f"{place}/") for place in API)
        for operation in operations.values():
            operation.get("responses", {}).pop("422", None)
            if needs_key and is_api:
                operation["security"] = [{_SCHEME: []}]
    components = document.setdefault("components", {})
    for name in ("HTTPValidationError", "ValidationError"):
        components.get("schemas", {}).pop(name, None)
    if needs_key:
        components["securitySchemes"] = {_SCHEME: {"type": "http", "scheme": "bearer"}}
    return document

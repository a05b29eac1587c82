"""What all requests have alike: exact types, no unknown fields, and `null` for what is left out."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue

MAX_INTEGER = 2**31 - 1

TokenId = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Unit = Annotated[float, Field(ge=0.0, le=1.0)]
Ignored = Annotated[JsonValue, Field(description="Accepted for the sake of existing clients; has no effect here.")]
Object = dict[str, JsonValue]


class Request(BaseModel):
    """Part of a request. Types are not converted, and a field that is not known is an error."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class Response(BaseModel):
    """Part of a response."""

    model_config = ConfigDict(use_attribute_docstrings=True, protected_namespaces=(), ser_json_inf_nan="null")


def omitted_if_none(**extra: Any) -> Any:
    """Declare a field of a response that is left out when it is None, where others would be null."""
    return Field(default=None, exclude_if=lambda value: value is None, **extra)

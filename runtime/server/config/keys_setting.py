"""API keys as settings: plain or hashed, alone or with limits of their own."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, field_validator

from inferencex.formats.errors import OptionError
from inferencex.runtime.server.access.hashing import parse_key
from inferencex.runtime.server.access.keys import KeyEntry, KeyStore
from inferencex.runtime.server.calls import Caller, CallerLimits


class ApiKey(BaseModel):
    """One key and what it may do; a text alone is a key without limits of its own."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, use_attribute_docstrings=True)

    key: SecretStr
    """The key itself, or its hash (`inferencex serve --hash-key`)."""
    name: str | None = Field(default=None, min_length=1, max_length=64, pattern=r"^[\w.@-]+$")
    """How logs, metrics and messages call who uses it; by default key-1, key-2, ..."""
    concurrent: int | None = Field(default=None, ge=1, strict=True)
    """Most requests at once."""
    requests_per_minute: int | None = Field(default=None, ge=1, strict=True)
    """Most requests a minute."""
    tokens_per_minute: int | None = Field(default=None, ge=1, strict=True)
    """Most tokens a minute, prompts and answers together."""
    priority: int = Field(default=0, strict=True)
    """Priority of its requests, and the most urgent they may name; lower goes first."""
    admin: bool = Field(default=False, strict=True)
    """Whether it may load and remove models."""

    @field_validator("key")
    @classmethod
    def _check(cls, key: SecretStr) -> SecretStr:
        try:
            parse_key(key.get_secret_value())
        except OptionError as error:
            raise ValueError(str(error)) from error
        return key


def _as_entry(value: Any) -> Any:
    return {"key": value} if isinstance(value, str) else value


KeySetting = Annotated[ApiKey, BeforeValidator(_as_entry)]
"""An `ApiKey`, or its key alone."""


def key_store(api_keys: tuple[ApiKey, ...], admin_keys: tuple[ApiKey, ...]) -> KeyStore:
    """Return the keys ready to be compared. Raises OptionError when two of them have one name."""
    entries: list[KeyEntry] = []
    names: set[str] = set()
    for prefix, keys in (("key", api_keys), ("admin", admin_keys)):
        for number, key in enumerate(keys, start=1):
            name = key.name or f"{prefix}-{number}"
            if name in names or name == "anonymous":
                raise OptionError(f"server.api_keys: the name {name!r} is taken; each key needs a name of its own")
            names.add(name)
            limits = CallerLimits(key.concurrent, key.requests_per_minute, key.tokens_per_minute)
            caller = Caller(name, key.priority, key.admin or prefix == "admin", limits)
            entries.append(KeyEntry(parse_key(key.key.get_secret_value()), caller))
    return KeyStore(entries)

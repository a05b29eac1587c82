"""`/v1/models`."""

from __future__ import annotations

from typing import Literal

from inferencex.runtime.server.openai.protocol.base import Response


class Model(Response):
    """A model that can be asked."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "inferencex"
    max_model_len: int
    """Longest prompt and answer together, in tokens."""
    version: str
    aliases: list[str]


class ModelList(Response):
    """All of them, the default one first."""

    object: Literal["list"] = "list"
    data: list[Model]

"""`/v1/embeddings`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from inferencex.runtime.server.openai.protocol.base import Ignored, Request, Response
from inferencex.runtime.server.openai.protocol.completions import Prompts


class EmbeddingRequest(Request):
    """Texts or token ids to embed."""

    input: Prompts
    model: str | None = Field(default=None, max_length=512)
    encoding_format: Literal["float", "base64"] | None = None
    """`base64` is float32, little-endian."""
    dimensions: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Keep the first numbers only, scaled to length 1 again."""
    pooling: Literal["mean", "last"] | None = None
    """What becomes of the vectors of all tokens; `mean` by default."""
    user: Ignored = None


class Embedding(Response):
    """One vector."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Response):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Response):
    """All vectors, in the order of the inputs."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage

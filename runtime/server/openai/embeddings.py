"""`POST /v1/embeddings`."""

from __future__ import annotations

import asyncio
import base64

import numpy as np
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray

from inferencex.runtime.server.errors import InvalidRequest
from inferencex.runtime.server.openai.answers import as_json, gone
from inferencex.runtime.server.openai.clients import watched
from inferencex.runtime.server.openai.context import Context
from inferencex.runtime.server.openai.prompts import as_prompts
from inferencex.runtime.server.openai.protocol.embeddings import (
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    EmbeddingUsage,
)
from inferencex.runtime.server.openai.protocol.errors import ERROR_RESPONSES
from inferencex.runtime.server.openai.route import StrictRoute

router = APIRouter(route_class=StrictRoute, strict_content_type=False)


@router.post(
    "/v1/embeddings",
    tags=["embeddings"],
    summary="Embed texts",
    response_model=None,
    responses={**ERROR_RESPONSES, 200: {"model": EmbeddingList}},
)
async def embed(body: EmbeddingRequest, request: Request) -> Response:
    """Return a vector of length 1 for each input."""
    context = Context.of(request)
    work = asyncio.create_task(
        context.service.embed(
            body.model, as_prompts(body.input), context.caller, context.request_id, body.pooling or "mean"
        )
    )
    try:
        async with watched(request.receive, work.cancel):
            batch = await work
    except asyncio.CancelledError:
        if work.cancelled():
            return gone()
        work.cancel()
        raise
    return as_json(
        EmbeddingList(
            data=[
                Embedding(index=index, embedding=_written(_cut(vector, body.dimensions), body.encoding_format))
                for index, vector in enumerate(batch.vectors)
            ],
            model=batch.model.name,
            usage=EmbeddingUsage(prompt_tokens=batch.prompt_tokens, total_tokens=batch.prompt_tokens),
        )
    )


def _cut(vector: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    """Return the first numbers of a vector, scaled to length 1 again."""
    if dimensions is None or dimensions == vector.size:
        return vector
    if dimensions > vector.size:
        raise InvalidRequest(
            f"dimensions={dimensions} is more than the {vector.size} numbers of this model's vectors",
            param="dimensions",
        )
    first = vector[:dimensions]
    length = float(np.linalg.norm(first))
    return (first / np.float32(length)) if length > 0.0 else first


def _written(vector: NDArray[np.float32], encoding: str | None) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode("ascii")
    numbers: list[float] = vector.tolist()
    return numbers

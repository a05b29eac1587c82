"""The HTTP API in OpenAI's shape: completions, chats, responses, embeddings, models, tokens."""

from __future__ import annotations

from fastapi import APIRouter

from inferencex.runtime.server.openai import chat, completions, embeddings, models, responses, tokens


def router() -> APIRouter:
    """Return the routes of the API."""
    whole = APIRouter()
    for part in (models, completions, chat, responses, embeddings, tokens):
        whole.include_router(part.router)
    return whole

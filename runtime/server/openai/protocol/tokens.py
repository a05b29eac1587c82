"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from inferencex.runtime.server.openai.protocol.base import Request, Response, TokenIds
from inferencex.runtime.server.openai.protocol.chat import Messages, Tools


class TokenizeRequest(Request):
    """A text, or a conversation that the chat template makes a text of."""

    model: str | None = Field(default=None, max_length=512)
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    """Whether to add the tokens that the model expects around a text; true for a prompt, false for messages."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(Response):
    """Token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Request):
    """Token ids."""

    model: str | None = Field(default=None, max_length=512)
    tokens: TokenIds
    skip_special_tokens: bool | None = None
    """False by default."""


class DetokenizeResponse(Response):
    """Their text."""

    prompt: str

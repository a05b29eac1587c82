"""`/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from inferencex.runtime.server.openai.protocol.base import Response, Texts, TokenIds, omitted_if_none
from inferencex.runtime.server.openai.protocol.sampling import Count, MaxTokens, SamplingFields
from inferencex.runtime.server.openai.protocol.usage import Usage

MAX_LOGPROBS = 20

Prompts = (
    str
    | Annotated[Texts, Field(min_length=1)]
    | Annotated[TokenIds, Field(min_length=1)]
    | Annotated[list[Annotated[TokenIds, Field(min_length=1)]], Field(fail_fast=True, min_length=1)]
)


class CompletionRequest(SamplingFields):
    """Texts or token ids to continue."""

    prompt: Prompts
    """A text, a list of token ids, or a list of either."""
    max_tokens: MaxTokens | None = None
    """Most tokens of an answer; 16 by default. 0 only makes sense with `echo`."""
    best_of: Count | None = None
    """Generate this many, and return the `n` that are likeliest by token."""
    echo: bool | None = None
    """Put the prompt in front of each answer."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Log-probabilities of each token and of this many of the likeliest at its place."""
    suffix: Literal[""] | None = None
    """Text behind the insertion is not supported."""
    add_special_tokens: bool | None = None
    """Whether to add the tokens that the model expects around a text; true by default."""


class CompletionLogprobs(Response):
    """Log-probabilities; all four lists have one entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]
    """Where in the text each token's characters begin."""


class CompletionChoice(Response):
    """One answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None = None
    """The stop text or stop token that ended it."""
    token_ids: list[int] | None = omitted_if_none()
    prompt_token_ids: list[int] | None = omitted_if_none()


class Completion(Response):
    """All answers."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionChoice]
    usage: Usage

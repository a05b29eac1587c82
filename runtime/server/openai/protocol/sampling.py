"""Fields that say how to continue, alike for completions and chats."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from inferencex.runtime.server.openai.protocol.base import (
    MAX_INTEGER,
    Ignored,
    Object,
    Request,
    Texts,
    TokenIds,
    Unit,
)

Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Field(ge=1, le=1024)]
MaxTokens = Annotated[int, Field(ge=0, le=MAX_INTEGER)]


class StreamOptions(Request):
    """What a stream holds beside the text."""

    include_usage: bool | None = None
    """End with a chunk that has the usage and no choices."""
    include_obfuscation: Ignored = None


class JsonSchemaFormat(Request):
    """A named schema."""

    name: str | None = Field(default=None, max_length=256)
    description: str | None = None
    schema_: Object | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Request):
    """What form the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Request):
    """Constraints beyond OpenAI's; one of them at a time."""

    json_: Object | str | None = Field(default=None, alias="json")
    """A JSON schema, as an object or as its text."""
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[Texts, Field(min_length=1)] | None = None
    grammar: str | None = None
    """A grammar in Lark's notation."""


class SamplingFields(Request):
    """How to continue."""

    model: str | None = Field(default=None, max_length=512)
    """Which model; by default the first one."""
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    n: Count | None = None
    """Number of answers; with more than one the temperature must be above 0."""
    stop: str | Annotated[Texts, Field(max_length=64)] | None = None
    """Texts that end the answer; they are not part of it."""
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = None
    """Added to the logits of these token ids."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    top_k: Annotated[int, Field(ge=-1, le=MAX_INTEGER)] | None = None
    """Keep this many of the likeliest tokens; 0 or -1 keeps all."""
    min_p: Unit | None = None
    """Keep tokens at least this likely, relative to the likeliest."""
    repetition_penalty: Annotated[float, Field(ge=0.001, le=1000.0)] | None = None
    min_tokens: MaxTokens | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)] | None = None
    """Lower is more urgent; never more urgent than the key allows."""
    timeout: Annotated[float, Field(ge=1.0, le=86400.0)] | None = None
    """Seconds that the request may take."""
    return_token_ids: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Object | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[Texts, Field(min_length=1)] | None = None
    guided_grammar: str | None = None

    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None

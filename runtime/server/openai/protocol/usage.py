"""How many tokens a request took."""

from __future__ import annotations

from collections.abc import Iterable

from inferencex.runtime.outputs import RequestOutput
from inferencex.runtime.server.openai.protocol.base import Response


class PromptTokensDetails(Response):
    """Where the prompt's tokens came from."""

    cached_tokens: int
    """Tokens that the prefix cache had."""


class Usage(Response):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, outputs: Iterable[RequestOutput], num_unwanted: int = 0) -> Usage:
        """Add up requests; `num_unwanted` tokens were generated that nobody asked for."""
        prompt = completion = cached = 0
        for output in outputs:
            prompt += len(output.prompt_token_ids)
            cached += output.num_cached_tokens
            completion += sum(len(each.token_ids) for each in output.outputs)
        completion -= num_unwanted
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )

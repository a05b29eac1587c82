"""Checks a request against the model and the pool, and resolves what it leaves open, before it is queued."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from inferencex.formats.errors import ContextLengthError, RequestError
from inferencex.formats.records import record
from inferencex.runtime.params import SamplingParams


@record(frozen=True)
class Limits:
    """What any request has to fit in.

    max_model_len: tokens of prompt and output together
    num_blocks:    blocks of the pool
    block_size:    tokens of a block
    """

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int

    @property
    def num_slots(self) -> int:
        """Tokens that the whole pool holds."""
        return self.num_blocks * self.block_size


def check_prompt(name: str, token_ids: Sequence[int], limits: Limits) -> tuple[int, ...]:
    """Return the prompt's token ids as a tuple; RequestError when the model cannot take them."""
    if len(token_ids) == 0:
        raise RequestError(f"{name}: the prompt has no tokens; at least one is needed")
    for position, token_id in enumerate(token_ids):
        if isinstance(token_id, bool) or not isinstance(token_id, int | np.integer):
            raise RequestError(f"{name}: position {position} of the prompt is {token_id!r}; expected a token id")
        if not 0 <= token_id < limits.vocab_size:
            raise RequestError(
                f"{name}: token {token_id} at position {position} of the prompt is not in the vocabulary "
                f"of {limits.vocab_size}"
            )
    return tuple(map(int, token_ids))


def check_priority(name: str, priority: int) -> None:
    """Raise RequestError for a priority that is no integer."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise RequestError(f"{name}: priority is {priority!r:.60}; expected an integer (lower ones go first)")


def resolve_max_tokens(
    name: str, num_prompt_tokens: int, asked: int | None, default: int | None, limits: Limits
) -> int:
    """Return how many tokens a continuation may have; RequestError, with the numbers, when that can never fit.

    Without a number from the request the model's default applies, cut to what fits.
    """
    room = limits.max_model_len - num_prompt_tokens
    slots = limits.num_slots - num_prompt_tokens
    wanted = 1 if asked is None else asked
    if wanted > room:
        raise ContextLengthError(
            f"{name}: {num_prompt_tokens} prompt tokens + max_tokens={wanted} make {num_prompt_tokens + wanted} "
            f"tokens, more than the context of {limits.max_model_len}; shorten the prompt or lower max_tokens"
        )
    if wanted > slots:
        raise RequestError(
            f"{name}: {num_prompt_tokens} prompt tokens + max_tokens={wanted} make {num_prompt_tokens + wanted} "
            f"tokens, more than the {limits.num_slots} that the whole KV cache holds ({limits.num_blocks} blocks of "
            f"{limits.block_size}); lower max_tokens or give more kv_cache_memory"
        )
    if asked is not None:
        return asked
    return min(room, slots) if default is None else min(room, slots, default)


def check_fits(name: str, num_prompt_tokens: int, limits: Limits) -> None:
    """Raise RequestError, with the numbers, for a prompt that is only read and can never fit."""
    if num_prompt_tokens > limits.max_model_len:
        raise ContextLengthError(
            f"{name}: {num_prompt_tokens} tokens are more than the context of {limits.max_model_len}; shorten the text"
        )
    if num_prompt_tokens > limits.num_slots:
        raise RequestError(
            f"{name}: {num_prompt_tokens} tokens are more than the {limits.num_slots} that the whole KV cache holds "
            f"({limits.num_blocks} blocks of {limits.block_size}); shorten the text or give more kv_cache_memory"
        )


def check_token_ids(name: str, params: SamplingParams, limits: Limits) -> None:
    """Raise RequestError when parameters speak of tokens or numbers of tokens that the vocabulary lacks."""
    named: dict[str, Iterable[int]] = {"logit_bias": params.logit_bias, "stop_token_ids": params.stop_token_ids}
    for option, ids in named.items():
        for token_id in ids:
            if token_id >= limits.vocab_size:
                raise RequestError(
                    f"{name}: {option} names token {token_id}, which is not in the vocabulary of {limits.vocab_size}"
                )
    counts: dict[str, Any] = {"logprobs": params.logprobs, "prompt_logprobs": params.prompt_logprobs}
    for option, count in counts.items():
        if count is not None and count > limits.vocab_size:
            raise RequestError(f"{name}: {option}={count} is more than the vocabulary of {limits.vocab_size}")


def cache_root(
    request_id: str, num_prompt_tokens: int, n: int, sharing: bool, length_independent_up_to: int | None
) -> Hashable | None:
    """Return the start of a request's prefix chain: what, beside its tokens, its layer state depends on.

    Without sharing between requests, the continuations of one request still share their prompt.
    """
    if not sharing and n == 1:
        return None
    length = None
    if length_independent_up_to is not None and num_prompt_tokens > length_independent_up_to:
        length = num_prompt_tokens
    return ("root", length, None if sharing else request_id)

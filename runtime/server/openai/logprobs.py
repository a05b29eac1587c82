"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence

from inferencex.runtime.outputs import Logprob, TokenLogprobs
from inferencex.runtime.server.openai.protocol.chat import TokenLogprob, TopLogprob
from inferencex.runtime.server.openai.protocol.completions import CompletionLogprobs
from inferencex.runtime.server.openai.token_texts import TokenTexts, token_texts
from inferencex.runtime.text.tokenizer import Tokenizer

_LEAST = -9999.0  # what stands for minus infinity, which JSON has not


def completion_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None], offsets: Sequence[int], ids: Sequence[int]
) -> CompletionLogprobs:
    """Return the shape of `/v1/completions`: four lists, one entry a token.

    `top_logprobs` has the chosen token also where it is not among the likeliest. Tokens of equal text share a key,
    which has the larger value. An entry is None for the first token of a prompt.
    """
    texts = token_texts(tokenizer)
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token_id, entry in zip(ids, entries, strict=True):
        values.append(None if entry is None else _finite(entry[token_id]))
        tops.append(None if entry is None else _by_name(texts, entry))
    return CompletionLogprobs(
        tokens=[texts.name_of(token_id) for token_id in ids],
        token_logprobs=values,
        top_logprobs=tops,
        text_offset=list(offsets),
    )


def chat_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], ids: Sequence[int], count: int
) -> list[TokenLogprob]:
    """Return the shape of `/v1/chat/completions`: each token with the `count` likeliest at its place."""
    texts = token_texts(tokenizer)
    found = []
    for token_id, entry in zip(ids, entries, strict=True):
        likeliest = sorted(entry.items(), key=lambda item: item[1].rank)[:count]
        top = [_top(texts, other, logprob) for other, logprob in likeliest]
        chosen = _top(texts, token_id, entry[token_id])
        found.append(TokenLogprob(token=chosen.token, logprob=chosen.logprob, bytes=chosen.bytes, top_logprobs=top))
    return found


def _by_name(texts: TokenTexts, entry: TokenLogprobs) -> dict[str, float]:
    named: dict[str, float] = {}
    for token_id, logprob in entry.items():
        name = texts.name_of(token_id)
        named[name] = max(_finite(logprob), named.get(name, _LEAST))
    return named


def _top(texts: TokenTexts, token_id: int, logprob: Logprob) -> TopLogprob:
    return TopLogprob(token=texts.text_of(token_id), logprob=_finite(logprob), bytes=list(texts.bytes_of(token_id)))


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, _LEAST)

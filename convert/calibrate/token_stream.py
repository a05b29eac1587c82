"""Documents as one long row of token ids, as far as it is needed, and what a model expects in front of a text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from inferencex.convert.calibrate.documents import Document, Reading, TextSource
from inferencex.formats.errors import OptionError, RequestError
from inferencex.runtime.text import Tokenizer

# So many characters are read for each token needed. Most texts have 2 to 5 a token, so windows are drawn from two to
# four times as many tokens as are needed.
_CHARACTERS_PER_TOKEN = 8
_STREAMED_SPREAD = 2  # tokens taken from a stream for each token needed


def text_prefix(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that the tokenizer puts in front of every text: usually none or one, the beginning of text."""
    bare, whole = (tokenizer.encode("a", add_special_tokens=added) for added in (False, True))
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start]
    return []


def token_stream(
    source: TextSource, tokenizer: Tokenizer, reading: Reading, *, needed: int, windows: int
) -> NDArray[np.int64]:
    """Return token ids of documents of `source`, one after the other: `needed` of them or more, or all there are.

    Of a long text, documents are drawn from all over it, at least half as many as there will be `windows`; they stay in
    order. Raises OptionError for text that cannot be read or encoded.
    """
    prefix = text_prefix(tokenizer)
    if source.streamed:
        return _from_stream(_encoded(source, source.documents(reading), tokenizer, prefix), needed)
    lengths = np.asarray([len(document.text) for document in source.documents(reading)], dtype=np.int64)
    wanted = needed * _CHARACTERS_PER_TOKEN
    while True:
        drawn = _drawn(lengths, wanted, windows // 2, reading.seed)
        documents = (d for d, taken in zip(source.documents(reading), drawn, strict=True) if taken)
        ids = _joined(_encoded(source, documents, tokenizer, prefix))
        if len(ids) >= needed or drawn.all():
            return ids
        wanted *= 2


def _from_stream(documents: Iterator[list[int]], needed: int) -> NDArray[np.int64]:
    taken: list[list[int]] = []
    count = 0
    for ids in documents:
        taken.append(ids)
        count += len(ids)
        if count >= needed * _STREAMED_SPREAD:
            break
    return _joined(taken)


def _drawn(lengths: NDArray[np.int64], wanted: int, least: int, seed: int) -> NDArray[np.bool_]:
    """Draw documents until they have `wanted` characters and are `least` or more: bool `[documents]`."""
    drawn = np.zeros(len(lengths), dtype=np.bool_)
    order = np.random.default_rng(seed).permutation(len(lengths))
    enough = int(np.searchsorted(np.cumsum(lengths[order]), wanted)) + 1
    drawn[order[: max(enough, least)]] = True
    return drawn


def _encoded(
    source: TextSource, documents: Iterable[Document], tokenizer: Tokenizer, prefix: list[int]
) -> Iterator[list[int]]:
    """Encode each document, without what goes in front of a text, which every window gets."""
    for document in documents:
        # What a chat needs between its parts, the template wrote.
        separator = "" if document.chat or document.text.endswith("\n") else "\n\n"
        try:
            ids = tokenizer.encode(document.text + separator, add_special_tokens=False)
        except RequestError as error:
            raise OptionError(f"--calibration {source.name}: {error}") from error
        yield ids[len(prefix) :] if prefix and ids[: len(prefix)] == prefix else ids


def _joined(documents: Iterable[list[int]]) -> NDArray[np.int64]:
    return np.asarray([token for ids in documents for token in ids], dtype=np.int64)

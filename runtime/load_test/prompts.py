"""Where prompts come from; no two of them begin alike unless that is asked for."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from inferencex.formats.errors import OptionError
from inferencex.runtime.load_test.api import Content
from inferencex.runtime.load_test.lengths import Lengths
from inferencex.runtime.load_test.tokenizer import Tokenizer
from inferencex.runtime.load_test.words import TokenVocabulary, WordVocabulary


@dataclass(frozen=True)
class Prompt:
    """What one request asks.

    tokens:      length of the prompt as it was made; None: the server will say
    max_tokens:  tokens of the answer at most
    """

    content: Content
    tokens: int | None
    max_tokens: int


def random_prompts(
    vocabulary: TokenVocabulary | WordVocabulary,
    lengths: Lengths,
    output_lengths: Lengths,
    source: random.Random,
    shared_prefix: int = 0,
) -> Iterator[Prompt]:
    """Yield prompts of random tokens or words without end.

    A prefix cache finds nothing in them but the first `shared_prefix` tokens, which come on top of the lengths.
    """
    # Drawn first, so that the tokens around a text (in its lengths) are counted once, with what is each prompt's own.
    if isinstance(vocabulary, TokenVocabulary):
        prefix = vocabulary.draw(shared_prefix, source) if shared_prefix else []
        while True:
            length = lengths.draw(source)
            ids = prefix + vocabulary.draw(length, source)
            yield Prompt(ids, len(ids), output_lengths.draw(source))
    beginning = vocabulary.draw(shared_prefix + vocabulary.around, source) if shared_prefix else ""
    while True:
        length = max(lengths.draw(source), vocabulary.around + 1)
        text = beginning + vocabulary.draw(length, source)
        yield Prompt(text, shared_prefix + length, output_lengths.draw(source))


async def text_prompts(
    ids: Sequence[int],
    lengths: Lengths,
    output_lengths: Lengths,
    source: random.Random,
    count: int,
    decoder: Tokenizer | None,
) -> list[Prompt]:
    """Return prompts cut out of a text, each beginning at a place of its own.

    decoder: turns them back into text, which may change the length by a token or so; None: they are sent as ids
    Raises OptionError when the text is too short.
    """
    drawn = [lengths.draw(source) for _ in range(count)]
    places = len(ids) - max(drawn, default=1) + 1
    if places < count:
        raise OptionError(
            f"--prompts: the text has {len(ids)} tokens, too few for {count} prompts of up to {max(drawn)} that begin "
            f"at places of their own; give a longer text or fewer --requests"
        )
    prompts = []
    for length, start in zip(drawn, source.sample(range(places), count), strict=True):
        window = list(ids[start : start + length])
        content: Content = window if decoder is None else await decoder.decode(window)
        prompts.append(Prompt(content, length if decoder is None else None, output_lengths.draw(source)))
    return prompts

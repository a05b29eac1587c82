"""Tokens to make prompts of: those of common English words, which every tokenizer of text knows."""

from __future__ import annotations

import random
from dataclasses import dataclass

from inferencex.formats.errors import RequestError
from inferencex.runtime.load_test.tokenizer import Tokenizer

_TEXT = (
    "a about after all also an and are as at back be because been big but by can come could day did do down each even "
    "find first for from get give go good great had has have he help her here him his home how I if in into is it its "
    "just know last like little long look made make man many may me more most much must my name never new no not now "
    "of off old on one only or other our out over own part people place put right said same saw say see she should "
    "small so some still such take tell than that the their them then there these they thing think this time to two "
    "under up us very was water way we well went were what when where which who will with word work world would year "
    "you"
)
WORDS = tuple(_TEXT.split())
_FEWEST = 16  # different tokens, for prompts that differ
_SAMPLES = (20, 60)  # words of the texts by which the exactness of lengths is tried


@dataclass(frozen=True)
class TokenVocabulary:
    """Token ids to draw prompts from, each as valid as any other."""

    ids: tuple[int, ...]

    def draw(self, length: int, source: random.Random) -> list[int]:
        """Return `length` random ids."""
        return source.choices(self.ids, k=length)


@dataclass(frozen=True)
class WordVocabulary:
    """Words that are one token each after a space, to draw texts of exact lengths from.

    around: tokens that a text has beside those of its words
    """

    words: tuple[str, ...]
    around: int

    def draw(self, length: int, source: random.Random) -> str:
        """Return a text of `length` tokens; of one word, where what is around it leaves no room for more."""
        return "".join(f" {word}" for word in source.choices(self.words, k=max(1, length - self.around)))


async def token_vocabulary(tokenizer: Tokenizer) -> TokenVocabulary:
    """Return the ids of `WORDS`; RequestError when they are too few to make different prompts of."""
    ids = sorted(set(await tokenizer.encode(" ".join(WORDS), special_tokens=False)))
    if len(ids) < _FEWEST:
        raise RequestError(f"the tokenizer has only {len(ids)} tokens for English text; give prompts by --prompts")
    return TokenVocabulary(tuple(ids))


async def word_vocabulary(tokenizer: Tokenizer, special_tokens: bool) -> WordVocabulary:
    """Return the words of `WORDS` that are one token each.

    special_tokens: whether the server puts special tokens around a prompt, which then count
    Raises RequestError when they are too few, or do not stay one token each beside one another.
    """
    before = len(await tokenizer.encode(" the", special_tokens))
    words = []
    for word in WORDS:
        if len(await tokenizer.encode(f" the {word}", special_tokens)) == before + 1:
            words.append(word)
    if len(words) < _FEWEST:
        raise RequestError(
            f"the tokenizer has only {len(words)} of {len(WORDS)} common English words as one token; "
            "give prompts by --prompts"
        )
    source = random.Random(0)
    around = set()
    for count in _SAMPLES:
        text = "".join(f" {word}" for word in source.choices(words, k=count))
        around.add(len(await tokenizer.encode(text, special_tokens)) - count)
    if len(around) != 1 or min(around) < 0:
        raise RequestError("texts of exact lengths cannot be made for this tokenizer; give prompts by --prompts")
    return WordVocabulary(tuple(words), around.pop())

"""The load that everything is measured under, and the prompts that it consists of."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from inferencex.runtime.load_test.lengths import Uniform
from inferencex.runtime.load_test.prompts import Prompt, random_prompts
from inferencex.runtime.load_test.tokenizer import FileTokenizer
from inferencex.runtime.load_test.words import token_vocabulary, word_vocabulary


@dataclass(frozen=True)
class Load:
    """`requests` prompts of `prompt_tokens`, `concurrency` at a time, each answered by `output_tokens`.

    threads: with which each engine computes
    repeat:  how often it is measured; the median counts
    seconds: no further repetition on a server after so long, once there is one streamed and one not
    """

    threads: int
    concurrency: int = 32
    prompt_tokens: int = 128
    output_tokens: int = 128
    requests: int = 128
    repeat: int = 3
    seconds: float = 60.0

    @property
    def longest(self) -> int:
        """Tokens of a sequence, with a little room for those that a server adds."""
        return self.prompt_tokens + self.output_tokens + 16

    def dump(self) -> str:
        """As JSON, for a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Load:
        """Read what `dump` wrote."""
        return cls(**json.loads(text))


def prompts(load: Load, tokenizer: Path, *, as_text: bool, seed: str) -> Iterator[list[Prompt]]:
    """Yield one list of prompts after the other, none of them seen before; the same ones for the same seed."""
    file = FileTokenizer(tokenizer)
    source = random.Random(seed)
    vocabulary = (
        asyncio.run(word_vocabulary(file, special_tokens=True)) if as_text else asyncio.run(token_vocabulary(file))
    )
    length, output = (Uniform(tokens, tokens) for tokens in (load.prompt_tokens, load.output_tokens))
    endless = random_prompts(vocabulary, length, output, source)
    while True:
        yield [*itertools.islice(endless, load.requests)]

"""Text to compare a bundle with its source on: English that ships with Python itself."""

from __future__ import annotations

import random
from pathlib import Path
from pydoc_data import topics

from inferencex.runtime.text import Tokenizer

_TOPIC = "assignment"


def probe_tokens(bundle: Path, vocabulary: int, count: int) -> list[int]:
    """Return `count` token ids: of text if the bundle has a tokenizer, else random ones (seeded)."""
    ids: list[int] = []
    if (bundle / "tokenizer.json").exists():
        ids = [i for i in Tokenizer.load(bundle).encode(topics.topics[_TOPIC][: count * 16]) if i < vocabulary][:count]
    generator = random.Random(0)
    return ids + [generator.randrange(vocabulary) for _ in range(count - len(ids))]

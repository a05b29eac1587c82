"""Text to compare a bundle with its source on: English that ships with Python itself."""

from __future__ import annotations

import random
from pathlib import Path
from pydoc_data import topics

from inferencex.runtime.text import Tokenizer

_TOPIC = "assignment"


def probe_tokens(folder: Path | None, vocabulary: int, count: int) -> list[int]:
    """Return `count` token ids: of text if there is a folder with a tokenizer, else random ones (seeded)."""
    ids: list[int] = []
    if folder is not None and (folder / "tokenizer.json").exists():
        ids = [i for i in Tokenizer.load(folder).encode(topics.topics[_TOPIC][: count * 16]) if i < vocabulary][:count]
    generator = random.Random(0)
    return ids + [generator.randrange(vocabulary) for _ in range(count - len(ids))]

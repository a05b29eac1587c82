"""Windows of a text that bundles are measured on, and a text that is always there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def windows_of(token_ids: Sequence[int], length: int, count: int) -> Iterator[Sequence[int]]:
    """Yield up to `count` consecutive windows of `length` tokens that do not overlap."""
    for start in range(0, min(len(token_ids) // length, count) * length, length):
        yield token_ids[start : start + length]


def builtin_text() -> str:
    """Return English text that ships with Python: its own language reference."""
    from pydoc_data import topics

    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))

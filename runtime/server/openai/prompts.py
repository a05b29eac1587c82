"""The four forms that a prompt can have, as a list of prompts."""

from __future__ import annotations

from collections.abc import Sequence


def as_prompts(prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]) -> list[str | list[int]]:
    """Return a text, token ids, or a list of either as the list of prompts."""
    if isinstance(prompt, str):
        return [prompt]
    ids = [item for item in prompt if isinstance(item, int)]
    if ids:
        return [ids]
    return [item if isinstance(item, str) else list(item) for item in prompt if not isinstance(item, int)]

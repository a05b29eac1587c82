"""In which order prompts go to the engine, so that those with equal beginnings find them in the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence


def prefix_order(prompts: Sequence[Sequence[int]], starts: Sequence[int], tokens_at_once: int) -> list[int]:
    """Return the places of `prompts` in an order that computes each context, the first `starts[i]` tokens, once.

    A step that begins several prompts cannot share what it is only about to compute. So one prompt of each context
    goes first, for as many contexts as make `tokens_at_once`; then the others of these contexts; then the next.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for place, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
        groups.setdefault(tuple(prompt[:start]), []).append(place)
    order: list[int] = []
    followers: list[int] = []
    tokens = 0
    for places in groups.values():
        order.append(places[0])
        followers += places[1:]
        tokens += len(prompts[places[0]])
        if tokens >= tokens_at_once:
            order += followers
            followers, tokens = [], 0
    return order + followers

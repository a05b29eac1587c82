"""Stop strings: where a text ends, found while it arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from inferencex.formats.errors import RequestError


class StopMatcher:
    """Passes a text on up to the first stop string, holding back only what may be the beginning of one.

    Which stop string ends the text does not depend on how the text was cut: the one that is complete first, and of
    several that end at the same character the longest (the one that starts first). So with stops `ab` and `abc`
    the text ends at `ab`, and with `c` and `bc` the text `abc` ends after `a`.

    With `include_stop` the stop string is part of the text. Raises RequestError for an empty stop string.
    """

    def __init__(self, stop: Sequence[str], include_stop: bool = False) -> None:
        for index, text in enumerate(stop):
            if not text:
                raise RequestError(f"stop[{index}] is empty; a stop string needs at least one character")
        # Longest first, so that the first one found complete at a character is the longest.
        self._stops = sorted(dict.fromkeys(stop), key=len, reverse=True)
        self._fallbacks = [_fallbacks(text) for text in self._stops]
        self._lengths = [0] * len(self._stops)  # characters of each stop string that the text ends with
        self._held = ""
        self._include_stop = include_stop
        self.matched: str | None = None

    def push(self, delta: str) -> str:
        """Take the next piece of the text and return what is safe to pass on; nothing once a stop was matched."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return delta
        for position, character in enumerate(delta):
            for index, stop in enumerate(self._stops):
                length = self._advance(index, character)
                if length == len(stop):
                    self.matched = stop
                    text = self._held + delta[: position + 1]
                    self._held = ""
                    return text if self._include_stop else text[: len(text) - len(stop)]
        text = self._held + delta
        safe = len(text) - max(self._lengths)
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """Return what is held back: the text has ended, so it is no beginning of a stop string."""
        text, self._held = self._held, ""
        self._lengths = [0] * len(self._stops)
        return text

    def _advance(self, index: int, character: str) -> int:
        """Extend the partial match of one stop string by a character (Knuth, Morris and Pratt 1977)."""
        stop, fallbacks, length = self._stops[index], self._fallbacks[index], self._lengths[index]
        while length and stop[length] != character:
            length = fallbacks[length - 1]
        if stop[length] == character:
            length += 1
        self._lengths[index] = length
        return length


def _fallbacks(text: str) -> list[int]:
    """For each prefix of `text`: the length of its longest proper suffix that is a prefix of `text` too."""
    table = [0] * len(text)
    length = 0
    for position in range(1, len(text)):
        while length and text[position] != text[length]:
            length = table[length - 1]
        if text[position] == text[length]:
            length += 1
        table[position] = length
    return table

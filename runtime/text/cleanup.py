"""The space clean-up that WordPiece-era tokenizers ask for after decoding."""

from __future__ import annotations

# In this order, one after the other over the whole text, as `transformers` applies them.
_REPLACEMENTS = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
_TOUCHED = frozenset("".join(before for before, _ in _REPLACEMENTS))


def clean_up_spaces(text: str) -> str:
    """Remove the spaces that decoding leaves in front of punctuation and English contractions."""
    for before, after in _REPLACEMENTS:
        text = text.replace(before, after)
    return text


class StreamingCleanUp:
    """`clean_up_spaces` over text that arrives in pieces: what comes out, joined, is the cleaned whole.

    A character that occurs in no pattern separates what is before it from what is after it, so everything up to
    the last such character can be cleaned and released.
    """

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        """Take the next piece and return the cleaned text that later pieces cannot change."""
        cut = len(text)
        while cut > 0 and text[cut - 1] in _TOUCHED:
            cut -= 1
        if cut == 0:
            self._held += text
            return ""
        ready, self._held = self._held + text[:cut], text[cut:]
        return clean_up_spaces(ready)

    def flush(self) -> str:
        """Return what is still held, cleaned."""
        ready, self._held = self._held, ""
        return clean_up_spaces(ready)

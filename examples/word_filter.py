"""Refuse words: WORDS=tea PYTHONPATH=examples inferencex serve --model-path BUNDLE --filter word_filter:Words."""

import os
import re

from inferencex.runtime.server.filters import FilterContext


class Words:
    """The words to refuse are in the variable WORDS, separated by commas."""

    def __init__(self) -> None:
        words = [re.escape(word.strip()) for word in os.environ["WORDS"].split(",") if word.strip()]
        self._pattern = re.compile(rf"\b({'|'.join(words)})\b", re.IGNORECASE)

    def check_input(self, text: str, context: FilterContext) -> str | None:
        return self._reason(text)

    def check_output(self, text: str, context: FilterContext) -> str | None:
        return self._reason(text)

    def _reason(self, text: str) -> str | None:
        found = self._pattern.search(text)
        return f"it has the word {found[0]!r} in it" if found else None

"""Text of one continuation as its tokens arrive: detokenized, and cut at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from inferencex.runtime.params import SamplingParams
from inferencex.runtime.text.detokenizer import IncrementalDetokenizer
from inferencex.runtime.text.stop import StopMatcher
from inferencex.runtime.text.tokenizer import Tokenizer


class TextStream:
    """Turns token ids into text that is safe to show: whole code points, and no part of a stop string.

    The text continues the prompt: `prompt text + text` reads as the whole sequence does.

    matched: the stop string that ended the text
    """

    __slots__ = ("_detokenizer", "_min_tokens", "_num_decoded", "_offsets", "_parts", "_stop_matcher", "matched")

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens, prompt_token_ids)
        self._stop_matcher = StopMatcher(tuple(params.stop), params.include_stop_str_in_output) if params.stop else None
        self._min_tokens = params.min_tokens
        self._parts: list[str] = []
        self._offsets: list[int] = []
        self._num_decoded = 0
        self.matched: str | None = None

    @property
    def text(self) -> str:
        """All text released so far."""
        return "".join(self._parts)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where in the finished text each token's characters start."""
        length = sum(map(len, self._parts))
        return tuple(min(offset, length) for offset in self._offsets)

    def push(self, token_id: int) -> str:
        """Add a token and return the text it releases."""
        self._offsets.append(self._num_decoded)
        decoded = self._detokenizer.push(token_id)
        self._num_decoded += len(decoded)
        # A stop string counts only when it lies wholly behind the first `min_tokens` tokens.
        if self._stop_matcher is not None and len(self._offsets) > self._min_tokens:
            decoded = self._stop_matcher.push(decoded)
            self.matched = self._stop_matcher.matched
        self._parts.append(decoded)
        return decoded

    def skip(self) -> None:
        """Count a token that ended the text and adds nothing to it."""
        self._offsets.append(self._num_decoded)

    def finish(self) -> str:
        """Return what was held back, at the end of a text that no stop string ended."""
        rest = self._detokenizer.flush()
        if self._stop_matcher is not None:
            rest = self._stop_matcher.push(rest)
            self.matched = self._stop_matcher.matched
            if self.matched is None:
                rest += self._stop_matcher.flush()
        self._parts.append(rest)
        return rest

"""One continuation's place in a grammar: llguidance's matcher as the engine's TokenConstraint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from inferencex.formats.errors import RequestError
from inferencex.runtime.backends.base import Int32Array

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GrammarConstraint:
    """Follows a grammar token by token; see `TokenConstraint`.

    `width` is the number of words of the matcher's own masks, which may be longer than those of the model.
    """

    __slots__ = ("_buffer", "_matcher")

    def __init__(self, matcher: LLMatcher, width: int) -> None:
        self._matcher = matcher
        self._buffer = np.empty(width, dtype=np.int32)

    @property
    def may_stop(self) -> bool:
        """Whether the output matches the grammar as it is."""
        return self._matcher.is_accepting()

    @property
    def finished(self) -> bool:
        """Whether nothing can follow."""
        return self._matcher.is_stopped()

    def fill_mask(self, mask: Int32Array) -> bool:
        """Write the tokens that may follow."""
        buffer = mask if mask.shape == self._buffer.shape else self._buffer
        self._matcher.unsafe_compute_mask_ptr(buffer.__array_interface__["data"][0], buffer.nbytes)
        self._check()
        if buffer is not mask:
            mask[:] = buffer[: len(mask)]
        return True

    def accept(self, token_id: int) -> None:
        """Take note of the next token."""
        if not self._matcher.consume_token(token_id):
            self._check()
            raise RequestError(f"token {token_id} does not continue the grammar")

    def _check(self) -> None:
        if self._matcher.is_error():
            said = " ".join(self._matcher.get_error().split())[:300]
            raise RequestError(
                f"the grammar cannot be followed any further, as one that refers to itself without end cannot: {said}"
            )


class GrammarConstraintFactory:
    """Makes constraints of one compiled grammar, each at its beginning. May be shared between threads."""

    __slots__ = ("_start", "_width")

    def __init__(self, start: LLMatcher, width: int) -> None:
        self._start = start
        self._width = width

    def __call__(self) -> GrammarConstraint:
        """Return a new constraint."""
        return GrammarConstraint(self._start.deep_copy(), self._width)

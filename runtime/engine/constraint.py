"""What a continuation may say: a rule, such as a grammar, that tells the tokens allowed next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from inferencex.formats.errors import BackendError, InferenceXError, RequestError
from inferencex.formats.records import record
from inferencex.runtime.backends.base import Int32Array


class TokenConstraint(Protocol):
    """The state of one continuation under a rule, from the first generated token on.

    It is told every token that is appended to the output, once and in order, but for one that ends it: preemption
    repeats nothing. Masks are asked for only where a token is chosen. An exception ends the request, and no other.
    """

    @property
    def may_stop(self) -> bool:
        """Whether the output is complete as it is: only then may it end of itself."""
        ...

    @property
    def finished(self) -> bool:
        """Whether nothing but the end may follow: the sequence stops without another token."""
        ...

    def fill_mask(self, mask: Int32Array) -> bool:
        """Write the tokens that may follow to int32 `[ceil(vocab_size / 32)]`: bit `i % 32` of word `i // 32`.

        The mask holds anything before. False leaves it alone, and allows every token.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Take note of a token that was appended."""
        ...


ConstraintFactory: TypeAlias = Callable[[], TokenConstraint]
"""Makes a constraint at its beginning: each continuation of a prompt has its own."""


@record(frozen=True)
class TokenMasks:
    """The tokens that may be chosen in one step.

    words:    int32 [K, ceil(vocab_size / 32)], a mask in each row
    rows:     for each sampled sequence its row of `words`; -1: every token is allowed
    failures: places of the sampled sequences whose constraint failed
    """

    words: Int32Array
    rows: list[int]
    failures: Mapping[int, InferenceXError] = field(default_factory=dict)

    def of(self, place: int) -> Int32Array | None:
        """Return the mask of the sampled sequence at `place`; None when it has none."""
        row = self.rows[place]
        return None if row < 0 else self.words[row]


def mask_width(vocab_size: int) -> int:
    """Return the words of a mask."""
    return -(-vocab_size // 32)


def allowed_tokens(mask: Int32Array, vocab_size: int) -> NDArray[np.bool_]:
    """Return a mask as one truth value a token, bool [V]."""
    words = np.ascontiguousarray(mask).astype("<u4", copy=False)
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size].astype(bool)


class SequenceConstraint:
    """A continuation's constraint as the engine uses it: with the tokens that end the request, and errors in words.

    Tokens that end the output (`ends`) are allowed whenever the constraint may stop. The model's end-of-sequence
    tokens are allowed only then; those that the request ignores, never.
    """

    __slots__ = ("_constraint", "_ends", "_eos", "_name", "_num_accepted", "ends")

    def __init__(
        self, name: str, constraint: TokenConstraint, ends: frozenset[int], eos_token_ids: Iterable[int]
    ) -> None:
        self._name = name
        self._constraint = constraint
        self._num_accepted = 0
        self.ends = ends
        self._ends = _bits(ends)
        self._eos = _bits(eos_token_ids)
        try:
            is_complete = constraint.finished
        except Exception as error:  # a constraint may fail in any way, and only its own request
            raise self._failed(error) from error
        if is_complete:
            raise RequestError(f"{name}: the constraint allows no output but the empty text; change the grammar")

    @property
    def may_stop(self) -> bool:
        """Whether the output may end here."""
        try:
            return self._constraint.may_stop
        except Exception as error:  # as above
            raise self._failed(error) from error

    def fill_mask(self, mask: Int32Array) -> None:
        """Write the tokens that may follow, those that end the output included."""
        try:
            if not self._constraint.fill_mask(mask):
                mask.fill(-1)
            may_stop = self._constraint.may_stop
        except Exception as error:  # as above
            raise self._failed(error) from error
        words = mask.view(np.uint32)
        for word, bit in self._eos:
            words[word] &= ~bit
        if may_stop:
            for word, bit in self._ends:
                words[word] |= bit

    def accept(self, token_id: int) -> bool:
        """Take note of the next token, and tell whether nothing may follow it; what ends the output is not told."""
        if token_id in self.ends:
            return False
        try:
            self._constraint.accept(token_id)
            self._num_accepted += 1
            return self._constraint.finished
        except Exception as error:  # as above
            raise self._failed(error) from error

    def nothing_allowed(self) -> RequestError:
        """Return the error of a sequence that may neither go on nor end."""
        return RequestError(
            f"{self._name}: after {self._num_accepted} tokens the constraint allows no token of the vocabulary, nor "
            "the end; the grammar asks for text that this tokenizer has no tokens for"
        )

    def _failed(self, error: Exception) -> InferenceXError:
        if isinstance(error, InferenceXError):
            return error
        return BackendError(
            f"{self._name}: its constraint failed after {self._num_accepted} tokens: {type(error).__name__}: {error}"
        )


def fill_masks(constraints: Sequence[SequenceConstraint | None], vocab_size: int) -> TokenMasks | None:
    """Return the masks of a step, for one constraint or None per sampled sequence; None without constraints."""
    count = sum(constraint is not None for constraint in constraints)
    if count == 0:
        return None
    rows: list[int] = []
    words = np.empty((count, mask_width(vocab_size)), dtype=np.int32)
    failures: dict[int, InferenceXError] = {}
    used = 0
    for place, constraint in enumerate(constraints):
        rows.append(-1)
        if constraint is None:
            continue
        try:
            constraint.fill_mask(words[used])
        except InferenceXError as error:
            failures[place] = error
            continue
        rows[place] = used
        used += 1
    return TokenMasks(words, rows, failures)


def _bits(token_ids: Iterable[int]) -> list[tuple[int, np.uint32]]:
    return [(token_id >> 5, np.uint32(1 << (token_id & 31))) for token_id in sorted(token_ids)]

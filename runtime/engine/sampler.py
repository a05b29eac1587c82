"""Chooses one sequence's next token from its logits; no choice depends on what else is in the batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import cast

import numpy as np
from numpy.typing import NDArray

from inferencex.runtime.backends.base import Float32Array, Int32Array
from inferencex.runtime.engine.constraint import TokenMasks, allowed_tokens
from inferencex.runtime.engine.logprobs import largest
from inferencex.runtime.engine.native import _sampler
from inferencex.runtime.params import GREEDY_TEMPERATURE, SamplingParams

Float64Array = NDArray[np.float64]

NOTHING_ALLOWED = _sampler.NOTHING_ALLOWED
"""The answer, no token id, for a mask that allows no token."""

_FIRST_NUCLEUS_GUESS = 64
_NUCLEUS_GROWTH = 8


class SequenceSampler:
    """The state of one continuation's sampling: its random stream and the tokens seen so far.

    Order of operations: repetition, presence and frequency penalties, logit bias, minimum length, the mask of a
    constraint, then (unless greedy) temperature, top-k, top-p and min-p, and one uniform draw a token. Where the mask
    allows only tokens that the minimum length forbids, the most likely of these is taken.

    The random stream is a function of (seed, index of the continuation), and a token takes one number from it,
    so a seeded request is reproducible in any batch and after any preemption.

    `choose` is the definition. `choose_tokens` gives the same tokens for a whole step in native code.

    rule: what native code knows of all this; None when every token is the largest of the logits as they come
    """

    __slots__ = (
        "_bias_ids",
        "_biases",
        "_counts",
        "_entropy",
        "_frequency",
        "_min_p",
        "_min_tokens",
        "_num_tokens",
        "_presence",
        "_prompt_ids",
        "_random",
        "_repetition",
        "_stop_ids",
        "_temperature",
        "_top_k",
        "_top_p",
        "rule",
    )

    def __init__(
        self, params: SamplingParams, index: int, prompt_token_ids: Iterable[int], stop_token_ids: Iterable[int]
    ) -> None:
        self._temperature = 1.0 if params.temperature is None else params.temperature
        self._top_k = params.top_k or 0
        self._top_p = 1.0 if params.top_p is None else params.top_p
        self._min_p = params.min_p or 0.0
        self._repetition = 1.0 if params.repetition_penalty is None else params.repetition_penalty
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        self._min_tokens = params.min_tokens
        self._stop_ids = np.fromiter(sorted(stop_token_ids), dtype=np.intp)
        self._bias_ids = np.fromiter(params.logit_bias.keys(), dtype=np.intp)
        self._biases = np.fromiter(params.logit_bias.values(), dtype=np.float32)
        self._prompt_ids = frozenset(prompt_token_ids) if self._repetition != 1.0 else frozenset()
        self._counts: dict[int, int] = {}
        self._num_tokens = 0
        # SeedSequence takes unsigned integers; negative seeds are as good as any.
        self._entropy = None if params.seed is None else [params.seed % 2**64, index]
        self._random: np.random.Generator | None = None
        self.rule = None if self.takes_argmax else self._native_rule()

    @property
    def is_greedy(self) -> bool:
        """Tell whether the most likely token is taken."""
        return self._temperature <= GREEDY_TEMPERATURE

    @property
    def takes_argmax(self) -> bool:
        """Tell whether the next token is the largest of the logits as they come."""
        return self.is_greedy and not self._adjusts()

    @property
    def is_plain(self) -> bool:
        """Tell whether the next token depends on nothing but logits, temperature, top-k, top-p, min-p and a draw."""
        return not self._adjusts()

    @property
    def limits(self) -> tuple[float, int, float, float]:
        """Temperature (0 when greedy), top-k, top-p and min-p."""
        return 0.0 if self.is_greedy else self._temperature, self._top_k, self._top_p, self._min_p

    def record(self, token_id: int) -> None:
        """Count a token that was appended to the output."""
        if self.rule is not None:
            self._num_tokens += 1
            self._counts[token_id] = self._counts.get(token_id, 0) + 1
            self.rule.record(token_id)

    def draw_uniform(self) -> float:
        """Return the random number in [0, 1) that the next token takes; greedy ones take none, and this is 0."""
        if self.is_greedy:
            return 0.0
        if self._random is None:  # made when it is needed, for numpy imports a lot for it
            self._random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(self._entropy)))
        return self._random.random()

    def choose(self, logits: Float32Array, uniform: float | None = None, mask: Int32Array | None = None) -> int:
        """Return the next token for finite float32 logits [V], which stay as they are.

        `uniform` is a number that `draw_uniform` gave; without it one is drawn. `mask` has the bits of the tokens that
        are allowed, int32 [ceil(V / 32)]; NOTHING_ALLOWED is returned when none is.
        """
        scores = self._adjust(logits.copy()) if self._adjusts() else logits
        if uniform is None:
            uniform = self.draw_uniform()
        if mask is not None:
            allowed = allowed_tokens(mask, logits.shape[0])
            if not allowed.any():
                return NOTHING_ALLOWED
            scores = np.where(allowed, scores, np.float32(-np.inf))
            if scores.max() == -np.inf:
                return int(np.where(allowed, logits, np.float32(-np.inf)).argmax())
        if self.is_greedy or not np.isfinite(scores.max()):  # all tokens are masked, or one is beyond all others
            return int(scores.argmax())
        return self._choose_at(scores, uniform)

    def _native_rule(self) -> _sampler.Rule:
        return _sampler.Rule(
            is_greedy=self.is_greedy,
            temperature=self._temperature,
            top_k=self._top_k,
            top_p=self._top_p,
            min_p=self._min_p,
            repetition_penalty=self._repetition,
            presence_penalty=self._presence,
            frequency_penalty=self._frequency,
            min_tokens=self._min_tokens,
            stop_ids=self._stop_ids.tolist(),
            biases=list(zip(self._bias_ids.tolist(), self._biases.tolist(), strict=True)),
            prompt_ids=list(self._prompt_ids),
        )

    def _adjusts(self) -> bool:
        return (
            self._repetition != 1.0
            or self._presence != 0.0
            or self._frequency != 0.0
            or self._bias_ids.size > 0
            or self._num_tokens < self._min_tokens
        )

    def _adjust(self, scores: Float32Array) -> Float32Array:
        if self._repetition != 1.0:
            seen = np.fromiter(set(chain(self._prompt_ids, self._counts)), dtype=np.intp)
            values = scores[seen]
            penalty = np.float32(self._repetition)
            scores[seen] = np.where(values > 0, values / penalty, values * penalty)
        if (self._presence or self._frequency) and self._counts:
            ids = np.fromiter(self._counts.keys(), dtype=np.intp)
            counts = np.fromiter(self._counts.values(), dtype=np.float32)
            scores[ids] -= np.float32(self._presence) + np.float32(self._frequency) * counts
        scores[self._bias_ids] += self._biases
        if self._num_tokens < self._min_tokens:
            scores[self._stop_ids] = -np.inf
        return scores

    def _choose_at(self, scores: Float32Array, uniform: float) -> int:
        """Take what stands at `uniform` in softmax(scores / temperature) [V] cut down by top-k, top-p and min-p."""
        # Differences to the peak are taken first: a small temperature then underflows to 0, never overflows.
        with np.errstate(over="ignore", under="ignore"):
            weights: Float64Array = np.exp((scores - scores.max()) / np.float64(self._temperature))
        token_ids = None
        if 0 < self._top_k < weights.shape[0]:
            token_ids = largest(scores, self._top_k)
            weights = weights[token_ids]
        if self._top_p < 1.0:
            kept = _nucleus(weights, self._top_p, is_sorted=token_ids is not None)
            token_ids = kept if token_ids is None else token_ids[kept]
            weights = weights[kept]
        if self._min_p > 0.0:
            # The peak's weight is exactly 1.
            kept = np.flatnonzero(weights >= self._min_p)
            token_ids = kept if token_ids is None else token_ids[kept]
            weights = weights[kept]
        cumulative = np.cumsum(weights)
        place = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
        if place == weights.shape[0]:  # the product was rounded up to the total
            place = int(np.flatnonzero(weights)[-1])
        return place if token_ids is None else int(token_ids[place])


def _nucleus(weights: Float64Array, top_p: float, is_sorted: bool) -> NDArray[np.intp]:
    """Return the fewest indices, heaviest first, whose weights reach `top_p` of the total (arXiv:1904.09751)."""
    wanted = top_p * float(weights.sum())
    guess = weights.shape[0] if is_sorted else _FIRST_NUCLEUS_GUESS
    while True:
        heaviest = np.arange(weights.shape[0]) if is_sorted else largest(weights, guess)
        cumulative = np.cumsum(weights[heaviest])
        if cumulative[-1] >= wanted or guess >= weights.shape[0]:
            return heaviest[: int(np.searchsorted(cumulative, wanted, side="left")) + 1]
        guess *= _NUCLEUS_GROWTH


def choose_tokens(
    logits: Float32Array, rows: Sequence[int], samplers: Sequence[SequenceSampler], masks: TokenMasks | None = None
) -> list[int | None]:
    """Return each sampler's next token, from its row of logits [R, V], of those that `masks` allow.

    None where the row has NaN or infinity, NOTHING_ALLOWED where no token is allowed.
    """
    uniforms = [0.0 if sampler.rule is None else sampler.draw_uniform() for sampler in samplers]
    rules = [sampler.rule for sampler in samplers]
    if masks is None:
        answers = _sampler.choose(logits, rows, rules, uniforms)
    else:
        answers = _sampler.choose(logits, rows, rules, uniforms, masks.words, masks.rows)
    if min(answers, default=0) >= 0:
        return cast("list[int | None]", answers)
    tokens: list[int | None] = []
    for place, (answer, row, sampler, uniform) in enumerate(zip(answers, rows, samplers, uniforms, strict=True)):
        if answer == _sampler.UNDECIDED:  # so close a call that the order of additions matters
            answer = sampler.choose(logits[row], uniform, None if masks is None else masks.of(place))
        tokens.append(None if answer == _sampler.NOT_FINITE else answer)
    return tokens

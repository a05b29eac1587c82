"""How far one model's predictions are from another's, over windows of a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inferencex.runtime.backends.base import BackendOptions, Executable, Float32Array, StepBatch

BLOCK_SIZE = 16
_VALUES_AT_ONCE = 1 << 22  # logits that are turned into float64 together: a few arrays of 32 MiB


@dataclass(frozen=True)
class DivergenceSummary:
    """Figures of one model against a reference, over `tokens` positions.

    mean_kl, p99_kl:  KL(reference || model) in nats per token
    same_top1:        share of positions at which both find the same token most likely
    reference_perplexity, perplexity:  of the text, by the reference and by the model
    """

    tokens: int
    mean_kl: float
    p99_kl: float
    same_top1: float
    reference_perplexity: float
    perplexity: float


class Divergence:
    """Takes in one window after the other; keeps one number a token."""

    def __init__(self) -> None:
        self._divergences: list[NDArray[np.float64]] = []
        self._same_top1 = 0
        self._log_likelihood = np.zeros(2)  # of the reference, of the model
        self._predicted = 0

    def add(self, reference: Float32Array, model: Float32Array, token_ids: Sequence[int] | NDArray[np.int64]) -> None:
        """Take in a window: logits `[T, vocab]` of the reference and of the model, and its token ids `[T]`."""
        ids = np.asarray(token_ids)
        rows = max(1, _VALUES_AT_ONCE // reference.shape[1])
        for start in range(0, len(ids), rows):
            part = slice(start, min(start + rows, len(ids)))
            log_p, log_q = log_softmax(reference[part]), log_softmax(model[part])
            after = ids[part.start + 1 : part.stop + 1]
            at = np.arange(len(after))
            self._log_likelihood += (log_p[at, after].sum(), log_q[at, after].sum())
            self._predicted += len(after)
            self._same_top1 += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
            self._divergences.append(np.maximum((np.exp(log_p) * (log_p - log_q)).sum(-1), 0.0))

    @property
    def per_token(self) -> NDArray[np.float64]:
        """KL(reference || model) of each token so far, in nats, float64 `[tokens]`."""
        return np.concatenate([*self._divergences, np.empty(0)])

    def summary(self) -> DivergenceSummary:
        """Return the figures; NaN for what there is no token of."""
        divergences = self.per_token
        tokens = len(divergences)
        reference, model = self._log_likelihood.tolist()
        return DivergenceSummary(
            tokens=tokens,
            mean_kl=float(divergences.mean()) if tokens else math.nan,
            p99_kl=float(np.quantile(divergences, 0.99)) if tokens else math.nan,
            same_top1=self._same_top1 / tokens if tokens else math.nan,
            reference_perplexity=_perplexity(reference, self._predicted),
            perplexity=_perplexity(model, self._predicted),
        )


def log_softmax(logits: Float32Array) -> NDArray[np.float64]:
    """Return log probabilities, float64, of logits `[T, vocab]`."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted


def whole_sequence_options(length: int, activation_dtype: str, kv_cache_dtype: str) -> BackendOptions:
    """Return options for an executable that runs sequences of up to `length` tokens, one at a time."""
    return BackendOptions(
        num_blocks=-(-length // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=length,
        activation_dtype=activation_dtype,
        kv_cache_dtype=kv_cache_dtype,
    )


def whole_sequence_logits(executable: Executable, token_ids: Sequence[int] | NDArray[np.int64]) -> Float32Array:
    """Run one sequence alone, in one step, and return its logits, float32 `[T, vocab]`, valid until the next step."""
    tokens = len(token_ids)

    def int32(values: object) -> NDArray[np.int32]:
        return np.asarray(values, dtype=np.int32)

    return executable.step(
        StepBatch(
            token_ids=int32(token_ids),
            positions=int32(range(tokens)),
            sequence_offsets=int32([0, tokens]),
            context_lengths=int32([tokens]),
            block_tables=int32([range(-(-tokens // BLOCK_SIZE))]),
            logit_rows=int32(range(tokens)),
            prompt_lengths=int32([tokens] * tokens),
        )
    )


def _perplexity(log_likelihood: float, tokens: int) -> float:
    """Return the perplexity of a text, at most e^50: beyond, a model has nothing to do with the text."""
    if not tokens:
        return math.nan
    loss = -log_likelihood / tokens
    return math.exp(min(loss, 50.0)) if loss == loss else math.nan

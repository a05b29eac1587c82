"""Log-probabilities of one row of logits, and selection of its largest entries without sorting it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferencex.formats.records import record
from inferencex.runtime.backends.base import Float32Array

IntArray = NDArray[np.intp]


def largest(values: NDArray[np.floating], count: int) -> IntArray:
    """Return the indices of the `count` largest of `values` [V], largest first, the lower index first on a tie.

    Takes a partition of the values and sorts only those it returns.
    """
    size = values.shape[0]
    if count >= size:
        candidates = np.arange(size)
    else:
        threshold = np.partition(values, size - count)[size - count]
        candidates = np.flatnonzero(values >= threshold)
    order = np.argsort(-values[candidates], kind="stable")
    return candidates[order[:count]]


@record(frozen=True)
class RankedToken:
    """A token id with its log-probability and its rank among all tokens, from 1."""

    token_id: int
    logprob: float
    rank: int


def ranked_logprobs(logits: Float32Array, chosen: int, count: int) -> list[RankedToken]:
    """Return the chosen token, then the `count` most likely ones, of float32 logits [V].

    The chosen token is not repeated, so that there are `count` or `count + 1` entries.
    """
    peak = float(logits.max())
    log_total = peak + float(np.log(np.exp(logits - np.float32(peak)).sum(dtype=np.float64)))
    rank = int(np.count_nonzero(logits > logits[chosen])) + 1
    ranked = [RankedToken(chosen, float(logits[chosen]) - log_total, rank)]
    if count:
        for place, token_id in enumerate(largest(logits, count), start=1):
            if token_id != chosen:
                ranked.append(RankedToken(int(token_id), float(logits[token_id]) - log_total, place))
    return ranked

"""The choice of a token among the candidates of a row (sampling.py): prefixes of an order, found by bisection."""

# Triton reads the types of a kernel's arguments when it is launched: annotations say only what is a constant.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

CANDIDATES_AT_ONCE = 2048

_NONE = tl.constexpr(-1)
_HIGHEST_KEY = tl.constexpr((1 << 63) - 1)
_BY_COUNT = tl.constexpr(0)
_TO_MASS = tl.constexpr(1)
_PAST_MASS = tl.constexpr(2)


@triton.jit
def ordered(scores):
    """Return integers in `0 .. 2^32 - 1`, int64, that are ordered as float32 numbers are; both zeros are one."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, (~bits).to(tl.int64), bits.to(tl.int64) + 2147483648)


@triton.jit
def _tile(logits, ids, weights, start, count, by_score, BLOCK: tl.constexpr):
    """Return a tile of candidates: their ids, weights, and keys, which are -1 for those that weigh nothing."""
    place = start + tl.arange(0, BLOCK)
    inside = place < count
    weight = tl.load(weights + place, mask=inside, other=0.0)
    token = tl.load(ids + place, mask=inside, other=0)
    if by_score:
        key = ordered(tl.load(logits + token, mask=inside, other=0.0).to(tl.float32))
    else:
        key = weight.to(tl.int64, bitcast=True)  # weights are not negative: their bits are in order
    return token, weight, tl.where(weight > 0.0, key, _NONE)


@triton.jit
def _find(logits, ids, weights, count, by_score, lowest, highest, k, mass, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Find where a prefix of the order, heaviest first, has what is wanted: at the highest key for which it does so.

    KIND: has `k` tokens (_BY_COUNT), has `mass` (_TO_MASS), or more than that (_PAST_MASS)

    Return the key, the mass and the number of tokens above it, and how many tokens have it. If even the whole has not
    what is wanted, the key is `lowest`. Both bounds are keys that there are; every step moves one to another such.
    """
    above_mass = tl.zeros((), tl.float64)
    above_count = tl.zeros((), tl.int32)
    while lowest < highest:
        middle = lowest + ((highest - lowest + 1) >> 1)
        masses = tl.zeros((BLOCK,), tl.float64)
        counts = tl.zeros((BLOCK,), tl.int32)
        next_up = tl.full((BLOCK,), _HIGHEST_KEY, tl.int64)
        next_down = tl.full((BLOCK,), _NONE, tl.int64)
        for start in range(0, count, BLOCK):
            _, weight, key = _tile(logits, ids, weights, start, count, by_score, BLOCK)
            is_above = key >= middle
            masses += tl.where(is_above, weight, 0.0)
            counts += is_above.to(tl.int32)
            next_up = tl.minimum(next_up, tl.where(is_above, key, _HIGHEST_KEY))
            next_down = tl.maximum(next_down, tl.where(is_above, _NONE, key))
        found_mass, found_count = tl.sum(masses, axis=0), tl.sum(counts, axis=0)
        if KIND == _BY_COUNT:
            has_it = found_count >= k
        elif KIND == _TO_MASS:
            has_it = found_mass >= mass
        else:
            has_it = found_mass > mass
        lowest = tl.where(has_it, tl.min(next_up, axis=0), lowest)
        highest = tl.where(has_it, highest, tl.max(next_down, axis=0))
        above_mass = tl.where(has_it, above_mass, found_mass)
        above_count = tl.where(has_it, above_count, found_count)
    ties = tl.zeros((BLOCK,), tl.int32)
    tie_weights = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, count, BLOCK):
        _, weight, key = _tile(logits, ids, weights, start, count, by_score, BLOCK)
        ties += (key == lowest).to(tl.int32)
        tie_weights = tl.maximum(tie_weights, tl.where(key == lowest, weight, 0.0))
    return lowest, above_mass, above_count, tl.sum(ties, axis=0), tl.max(tie_weights, axis=0)


@triton.jit
def choose(
    logits,
    ids,
    weights,
    counts,
    totals,
    top_k,
    top_p,
    min_p,
    uniform,
    tokens,
    vocabulary,
    BLOCK: tl.constexpr,
):
    """Write the token that a row's uniform number picks among its candidates; a program is a row.

    logits, ids, weights: `[R, V]`; of ids and weights, `counts [R]` are candidates, by token id
    totals:               float64 `[R]`, the sum of all weights, of rows with top-p and no top-k
    tokens:               int32 `[R]`; stays as it is where there are no candidates
    """
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + row)
    if count > 0:
        logits += row * vocabulary
        ids += row * vocabulary
        weights += row * vocabulary
        k = tl.load(top_k + row).to(tl.int32)
        nucleus, least = tl.load(top_p + row), tl.load(min_p + row)
        by_score = (k > 0) & (k < vocabulary)

        masses = tl.zeros((BLOCK,), tl.float64)
        likely = tl.zeros((BLOCK,), tl.float64)
        low = tl.full((BLOCK,), _HIGHEST_KEY, tl.int64)
        likely_low = tl.full((BLOCK,), _HIGHEST_KEY, tl.int64)
        high = tl.full((BLOCK,), _NONE, tl.int64)
        for start in range(0, count, BLOCK):
            _, weight, key = _tile(logits, ids, weights, start, count, by_score, BLOCK)
            is_likely = (weight >= least) & (key >= 0)
            masses += weight
            likely += tl.where(is_likely, weight, 0.0)
            low = tl.minimum(low, tl.where(key >= 0, key, _HIGHEST_KEY))
            likely_low = tl.minimum(likely_low, tl.where(is_likely, key, _HIGHEST_KEY))
            high = tl.maximum(high, key)
        total = tl.sum(masses, axis=0)
        lowest, highest = tl.min(low, axis=0), tl.max(high, axis=0)

        # Where the prefix that is kept ends: a key, and how many tokens of that key belong to it.
        end = lowest
        kept = tl.zeros((), tl.int32) + count
        if by_score:
            key, above, number, ties, weight = _find(
                logits, ids, weights, count, by_score, lowest, highest, k, total, _BY_COUNT, BLOCK
            )
            end = key
            kept = tl.minimum(k - number, ties)
            total = above + kept * weight
        if nucleus < 1.0:
            if not by_score:
                total = tl.load(totals + row)
            wanted = nucleus * total
            key, above, _, ties, weight = _find(
                logits, ids, weights, count, by_score, end, highest, k, wanted, _TO_MASS, BLOCK
            )
            fewest = tl.minimum(tl.maximum(tl.ceil((wanted - above) / weight).to(tl.int32), 1), ties)
            kept = tl.where(key == end, tl.minimum(fewest, kept), fewest)
            end = key
            total = above + kept * weight
        if least > 0.0:
            likely_end = tl.min(likely_low, axis=0)
            total = tl.where(likely_end > end, tl.sum(likely, axis=0), total)
            kept = tl.where(likely_end > end, count, kept)
            end = tl.maximum(end, likely_end)

        target = tl.load(uniform + row) * total
        chosen = tl.zeros((), tl.int32)
        if by_score | (nucleus < 1.0):
            key, above, _, ties, weight = _find(
                logits, ids, weights, count, by_score, end, highest, k, target, _PAST_MASS, BLOCK
            )
            last = tl.where(key == end, tl.minimum(kept, ties), ties) - 1
            place = tl.minimum(tl.maximum(tl.floor((target - above) / weight).to(tl.int32), 0), last)
            seen = tl.zeros((), tl.int32)
            for start in range(0, count, BLOCK):
                token, weights_here, key_here = _tile(logits, ids, weights, start, count, by_score, BLOCK)
                is_tie = (key_here == key).to(tl.int32)
                rank = seen + tl.cumsum(is_tie, axis=0) - 1
                chosen += tl.sum(tl.where((is_tie == 1) & (rank == place), token, 0), axis=0)
                seen += tl.sum(is_tie, axis=0)
        else:
            # The last one that weighs anything stands in where the product was rounded up to the total.
            past = tl.zeros((), tl.float64)
            first = tl.full((), 2147483647, tl.int32)
            last = tl.zeros((), tl.int32)
            for start in range(0, count, BLOCK):
                token, weights_here, key_here = _tile(logits, ids, weights, start, count, by_score, BLOCK)
                counted = tl.where(key_here >= end, weights_here, 0.0)
                is_past = (past + tl.cumsum(counted, axis=0) > target) & (counted > 0.0)
                first = tl.minimum(first, tl.min(tl.where(is_past, token, 2147483647), axis=0))
                last = tl.maximum(last, tl.max(tl.where(counted > 0.0, token, 0), axis=0))
                past += tl.sum(counted, axis=0)
            chosen = tl.minimum(first, last)
        tl.store(tokens + row, chosen)

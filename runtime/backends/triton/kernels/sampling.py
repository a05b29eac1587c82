"""Choice of tokens from logits by temperature, top-k, top-p (arXiv:1904.09751) and min-p, without sorting them.

The definition is `SequenceSampler._choose_at` (runtime/engine/sampler.py): tokens have weights
`exp((logit - largest) / temperature)` in float64; some are kept; what a uniform number picks is the token at which the
running sum of weights passes `uniform` of their total. The sum runs by token id where nothing sorts, and from the
heaviest down (ties by token id) with top-k or top-p. Every set that is kept is a *prefix* of that order, so neither
needs a sort: the last token of a prefix, and the token that is picked, are found by bisection over the order's key (a
logit under top-k, else a weight), each step of which adds up what lies above a value. Equal ones are counted.

Five kernels, all but two over all chunks of all rows at once:

    summarize    largest, first place of it, finiteness of each chunk; largest of each group of 64 logits
    add_up       sum of a chunk's weights, for rows with top-p and no top-k
    gather       ids of the candidates of a row in order: under top-k, the k-th largest of the groups' largest bounds
                 the k-th largest logit from below, and few are above it; under top-p alone, what weighs less than
                 `(1 - top_p) * total / V` is not in the nucleus, for all of that together weighs less than the rest may
    weigh        weights of the candidates
    choose       prefixes and the choice, by one program a row, over the candidates only

It reads the logits about three times, and computes in float64 for each candidate. A choice differs from the
definition's only where the running sum passes a border (`uniform * total`, `top_p * total`) within rounding of float64
sums, some 1e-13 of the total, or, on a GPU, where its `exp` rounds differently (1e-16) just there.
"""

# Triton reads the types of a kernel's arguments when it is launched: annotations say only what is a constant.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferencex.runtime.backends.triton.kernels.sampling_choice import CANDIDATES_AT_ONCE, choose, ordered
from inferencex.runtime.backends.triton.kernels.variant import KernelVariant
from inferencex.runtime.params import GREEDY_TEMPERATURE

_CHUNK = 4096
_GROUP = 64
_WORKSPACE = 256 << 20  # bytes that candidates of the rows of one launch may take
_BYTES_A_CANDIDATE = 12
_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
_SLACK = tl.constexpr(0.7)  # more than log(2): candidates are told from others by logits that far outside


@triton.jit
def _summarize(logits, peaks, places, finite, groups, vocabulary, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    """Write what is known of a chunk; grid `[R, chunks]`.

    logits: `[R, V]`; peaks: float32, places: int32, finite: int32, `[R, chunks]`; groups: float32 `[R, chunks * 64]`
    """
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocabulary
    scores = tl.load(logits + row * vocabulary + token, mask=inside, other=-float("inf")).to(tl.float32)
    is_bad = inside & ~(tl.abs(scores) < float("inf"))
    scores = tl.where(is_bad, -float("inf"), scores)
    peak = tl.max(scores, axis=0)
    place = tl.min(tl.where(scores == peak, token, 2147483647), axis=0)
    summary = row * chunks + chunk
    tl.store(peaks + summary, peak)
    tl.store(places + summary, place)
    tl.store(finite + summary, 1 - tl.max(is_bad.to(tl.int32), axis=0))
    COUNT: tl.constexpr = CHUNK // GROUP
    of_groups = tl.max(tl.reshape(scores, (COUNT, GROUP)), axis=1)
    tl.store(groups + summary * COUNT + tl.arange(0, COUNT), of_groups)


@triton.jit
def _peak(peaks, row, chunks, CHUNKS: tl.constexpr):
    """Return the largest logit of a row."""
    chunk = tl.arange(0, CHUNKS)
    return tl.max(tl.load(peaks + row * chunks + chunk, mask=chunk < chunks, other=-float("inf")), axis=0)


@triton.jit
def _add_up(
    logits, peaks, temperature, top_k, top_p, masses, vocabulary, chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """Write the sum of a chunk's weights, float64 `[R, chunks]`, where `_gather` reads it."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat, k = tl.load(temperature + row), tl.load(top_k + row)
    limits = (k > 0) & (k < vocabulary)
    if (heat > _GREEDY) & (tl.load(top_p + row) < 1.0) & (not limits):
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = token < vocabulary
        scores = tl.load(logits + row * vocabulary + token, mask=inside, other=0.0).to(tl.float32)
        below = (scores - _peak(peaks, row, chunks, CHUNKS)).to(tl.float64)
        weights = tl.where(inside, tl.exp(below / heat), 0.0)
        tl.store(masses + row * chunks + chunk, tl.sum(weights, axis=0))


@triton.jit
def _gather(
    logits,
    peaks,
    places,
    finite,
    groups,
    masses,
    temperature,
    top_k,
    top_p,
    min_p,
    ids,
    counts,
    totals,
    tokens,
    vocabulary,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Write the candidates of a row in order, int32 `[R, V]`, and their number; a program is a row.

    Rows that need no choice have none, and their answer is written to `tokens`. Where candidates are what may be in a
    nucleus, the sum of all weights is written to `totals`, float64 `[R]`.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    is_chunk = chunk < chunks
    peak = _peak(peaks, row, chunks, CHUNKS)
    is_finite = tl.min(tl.load(finite + row * chunks + chunk, mask=is_chunk, other=1), axis=0) == 1
    chunk_peaks = tl.load(peaks + row * chunks + chunk, mask=is_chunk, other=-float("inf"))
    firsts = tl.load(places + row * chunks + chunk, mask=is_chunk, other=2147483647)
    largest = tl.min(tl.where(chunk_peaks == peak, firsts, 2147483647), axis=0)
    tl.store(tokens + row, tl.where(is_finite, largest, -1))

    heat = tl.load(temperature + row)
    k = tl.load(top_k + row).to(tl.int32)
    nucleus, least = tl.load(top_p + row), tl.load(min_p + row)
    count = 0
    if is_finite & (heat > _GREEDY):
        bound = tl.zeros((), tl.int64)
        cut = tl.full((), -float("inf"), tl.float64)
        if (k > 0) & (k < vocabulary):
            group = tl.arange(0, GROUPS)
            in_groups = tl.load(
                groups + row * chunks * (CHUNK // 64) + group, mask=group < chunks * (CHUNK // 64), other=-float("inf")
            )
            keys = ordered(in_groups)
            for step in range(32):
                tried = bound | (tl.full((), 1, tl.int64) << (31 - step))
                above = tl.sum((keys >= tried).to(tl.int32), axis=0)
                bound = tl.where(above >= k, tried, bound)
        elif nucleus < 1.0:
            of_chunks = tl.load(masses + row * chunks + chunk, mask=is_chunk, other=0.0)
            total = tl.sum(of_chunks, axis=0)
            tl.store(totals + row, total)
            cut = (tl.log((1.0 - nucleus) * total / vocabulary) - _SLACK) * heat
        elif least > 0.0:
            cut = (tl.log(least) - _SLACK) * heat
        for number in range(0, chunks):
            highest = tl.load(peaks + row * chunks + number)
            if (ordered(highest) >= bound) & ((highest - peak).to(tl.float64) >= cut):
                token = number * CHUNK + tl.arange(0, CHUNK)
                inside = token < vocabulary
                scores = tl.load(logits + row * vocabulary + token, mask=inside, other=0.0).to(tl.float32)
                is_candidate = inside & (ordered(scores) >= bound) & ((scores - peak).to(tl.float64) >= cut)
                taken = is_candidate.to(tl.int32)
                place = count + tl.cumsum(taken, axis=0) - 1
                tl.store(ids + row * vocabulary + place, token, mask=is_candidate)
                count += tl.sum(taken, axis=0)
    tl.store(counts + row, count)


@triton.jit
def _weigh(
    logits, peaks, temperature, ids, counts, weights, vocabulary, chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """Write the weights of a chunk of candidates, float64 `[R, V]`; grid `[R, chunks]`."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    count = tl.load(counts + row)
    if tl.program_id(1) * CHUNK < count:
        inside = place < count
        token = tl.load(ids + row * vocabulary + place, mask=inside, other=0)
        scores = tl.load(logits + row * vocabulary + token, mask=inside, other=0.0).to(tl.float32)
        below = (scores - _peak(peaks, row, chunks, CHUNKS)).to(tl.float64)
        tl.store(weights + row * vocabulary + place, tl.exp(below / tl.load(temperature + row)), mask=inside)


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """Return a token id for each row, int32 `[R]`; -1 for rows that hold a NaN or an infinity.

    logits:      `[R, V]`, float32, float16 or bfloat16
    temperature: float64 `[R]`; up to `GREEDY_TEMPERATURE`, the first of the largest is taken
    top_k:       int32 `[R]`; 0, less, or V and more for all
    top_p:       float64 `[R]`; 1 for all
    min_p:       float64 `[R]`; 0 for all
    uniform:     float64 `[R]`, in [0, 1)
    """
    rows, vocabulary = _checked(logits, temperature, top_k, top_p, min_p, uniform)
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    at_once = max(1, _WORKSPACE // (_BYTES_A_CANDIDATE * vocabulary))
    for first in range(0, rows, at_once):
        parts = [part[first : first + at_once] for part in (logits, temperature, top_k, top_p, min_p, uniform, tokens)]
        _sample(*parts)
    return tokens


def _sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    tokens: Tensor,
) -> None:
    rows, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, _CHUNK)
    sizes = {"CHUNK": _CHUNK, "CHUNKS": triton.next_power_of_2(chunks)}

    def empty(width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((rows, width), dtype=dtype, device=logits.device)

    peaks, places, finite = empty(chunks, torch.float32), empty(chunks, torch.int32), empty(chunks, torch.int32)
    groups, masses = empty(chunks * (_CHUNK // _GROUP), torch.float32), empty(chunks, torch.float64)
    ids, weights = empty(vocabulary, torch.int32), empty(vocabulary, torch.float64)
    counts, totals = empty(1, torch.int32), empty(1, torch.float64)
    whole = (rows, chunks)
    _summarize[whole](logits, peaks, places, finite, groups, vocabulary, CHUNK=_CHUNK, GROUP=_GROUP)
    _add_up[whole](logits, peaks, temperature, top_k, top_p, masses, vocabulary, chunks, **sizes)
    _gather[(rows,)](
        logits,
        peaks,
        places,
        finite,
        groups,
        masses,
        temperature,
        top_k,
        top_p,
        min_p,
        ids,
        counts,
        totals,
        tokens,
        vocabulary,
        chunks,
        **sizes,
        GROUPS=triton.next_power_of_2(groups.shape[1]),
        num_warps=8,
    )
    _weigh[whole](logits, peaks, temperature, ids, counts, weights, vocabulary, chunks, **sizes)
    choose[(rows,)](
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
        BLOCK=CANDIDATES_AT_ONCE,
        num_warps=8,
    )


def _checked(logits: Tensor, *parts: Tensor) -> tuple[int, int]:
    if logits.dim() != 2 or not logits.is_contiguous() or not logits.shape[1] or not logits.is_floating_point():
        raise ValueError(f"logits {logits.dtype} {list(logits.shape)}; expected contiguous floats [rows, vocabulary]")
    rows = logits.shape[0]
    names = ("temperature", "top_k", "top_p", "min_p", "uniform")
    for name, part in zip(names, parts, strict=True):
        dtype = torch.int32 if name == "top_k" else torch.float64
        if list(part.shape) != [rows] or part.dtype != dtype or not part.is_contiguous():
            raise ValueError(f"{name} is {part.dtype} {list(part.shape)}; expected contiguous {dtype} [{rows}]")
    return rows, logits.shape[1]


def variants() -> list[KernelVariant]:
    """Return what launches compile, for vocabularies of up to 262144 tokens."""
    found = []
    sizes = {"CHUNK": _CHUNK, "CHUNKS": 64}
    of_rows = {"temperature": "*fp64", "top_k": "*i32", "top_p": "*fp64", "min_p": "*fp64", "uniform": "*fp64"}
    summaries = {"peaks": "*fp32", "places": "*i32", "finite": "*i32", "groups": "*fp32", "masses": "*fp64"}
    candidates = {"ids": "*i32", "weights": "*fp64", "counts": "*i32", "totals": "*fp64", "tokens": "*i32"}
    numbers = {"vocabulary": "i32", "chunks": "i32"}
    cases = (
        (_summarize, "summaries", {"CHUNK": _CHUNK, "GROUP": _GROUP}, 4),
        (_add_up, "sums of weights", sizes, 4),
        (_gather, "candidates", {**sizes, "GROUPS": 4096}, 8),
        (_weigh, "weights", sizes, 4),
        (choose, "choice", {"BLOCK": CANDIDATES_AT_ONCE}, 8),
    )
    for dtype in ("fp32", "bf16", "fp16"):
        known = {"logits": f"*{dtype}", **of_rows, **summaries, **candidates, **numbers}
        for kernel, name, constants, warps in cases:
            signature = {argument: known[argument] for argument in kernel.arg_names if argument not in constants}
            pointers = tuple(argument for argument, kind in signature.items() if kind.startswith("*"))
            found.append(
                KernelVariant(
                    kernel,
                    f"sampling {name} {dtype}",
                    signature,
                    constants,
                    num_warps=warps,
                    aligned=(*pointers, "vocabulary"),
                )
            )
    return found

"""Queries over a range of keys that lie in pages: the loop that the kernels of prefill and decode share.

It is the online softmax of Milakov and Gimelshein (2018) as FlashAttention has it (Dao et al. 2022, algorithm 1; Dao
2023): scores of a block of keys stay in registers, and sums over earlier blocks are rescaled when a larger score is
met. Scores are in units of log2(e), so that the exponentials are powers of two.

Head widths that are no powers of two are cut in two parts, `MAIN` and `TAIL`, each a power of two with the end of the
last masked: 576 is 512 + 64, 192 is 128 + 64, 80 is 64 + 16. The tail is 0 where there is none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inferencex.runtime.backends.triton.kernels.kv_pages import number_of

LOWEST = tl.constexpr(-1.0e38)
"""The largest score before any score was seen: finite, so that differences of it are no NaN."""

LOG2_E = tl.constexpr(1.4426950408889634)


def parts_of(width: int) -> tuple[int, int]:
    """Return `MAIN` and `TAIL` of a head width: powers of two from 16 up that cover it with least waste.

    The tail is smaller than the main part, and 0 where one part is as good as two.
    """
    main = max(16, 1 << (width.bit_length() - 1))
    if width <= main:
        return main, 0
    tail = max(16, 1 << (width - main - 1).bit_length())
    return (main, tail) if tail < main else (2 * main, 0)


@triton.jit
def columns_of(  # type: ignore[no-untyped-def]
    rows,
    mask,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
    AGAIN: tl.constexpr = False,
):
    """Load columns `FIRST .. FIRST + SIZE - 1` of the rows at pointers `rows [N]`.

    Columns from `WIDTH` on are zeros and not read; if `MASKED`, so are rows where `mask [N]` is false.
    `AGAIN` keeps the compiler from moving the load out of a loop.
    """
    columns = FIRST + tl.arange(0, SIZE)
    pointers = rows[:, None] + columns[None, :]
    if FIRST + SIZE <= WIDTH:
        if MASKED:
            x = tl.load(pointers, mask=mask[:, None], other=0, volatile=AGAIN)
        else:
            x = tl.load(pointers, volatile=AGAIN)
    else:
        inside = (columns < WIDTH)[None, :]
        if MASKED:
            inside = inside & mask[:, None]
        x = tl.load(pointers, mask=inside, other=0, volatile=AGAIN)
    return x


@triton.jit
def store_columns(rows, x, mask, FIRST: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store `x [M, SIZE]` in columns `FIRST .. FIRST + SIZE - 1` of the rows at pointers `rows [M]`.

    Columns from `WIDTH` on are left out, and rows where `mask [M]` is false.
    """
    columns = FIRST + tl.arange(0, SIZE)
    inside = mask[:, None] & (columns < WIDTH)[None, :]
    tl.store(rows[:, None] + columns[None, :], x.to(rows.dtype.element_ty), mask=inside)


@triton.jit
def first_visible(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the first key that a query at `position` sees."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(first, position - (WINDOW - 1))
    if CHUNK > 0:
        first = tl.maximum(first, position // CHUNK * CHUNK)
    return first


@triton.jit
def _visible(keys, positions, WINDOW: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tell which `keys [N]` the queries at `positions [M]` see: [M, N]."""
    visible = keys[None, :] <= positions[:, None]
    if WINDOW > 0:
        visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
    if CHUNK > 0:
        visible = visible & (keys[None, :] // CHUNK == positions[:, None] // CHUNK)
    return visible


@triton.jit
def final_factor(largest, total, sink, SINKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return what sums of weighted values are multiplied by once all keys are in; `sink` is a logit times log2(e)."""
    if SINKS:
        higher = tl.maximum(largest, sink)
        shrink = tl.exp2(largest - higher)
        factor = shrink / (total * shrink + tl.exp2(sink - higher))
    else:
        factor = 1.0 / total
    return factor


@triton.jit
def attend_keys(  # type: ignore[no-untyped-def]
    q_main,
    q_tail,
    q_rows,
    positions,
    slopes,
    y_main,
    y_tail,
    largest,
    total,
    start,
    stop,
    lowest,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    scale,
    KV_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    FORMAT: tl.constexpr,
    TOKEN_SCALES: tl.constexpr,
    DK_MAIN: tl.constexpr,
    DK_TAIL: tl.constexpr,
    DV_MAIN: tl.constexpr,
    DV_TAIL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KEY_STEP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend over the keys `start .. stop - 1` of a sequence, `BLOCK_N` at a time, and return the sums so far.

    q_main [M, DK_MAIN], q_tail [M, DK_TAIL]: queries; products are of their type
    q_rows [M]: pointers to the queries, which with `KEY_STEP` are read again for every block of keys, so many columns
        at once: wide heads would take more registers than there are
    positions int32 [M]; slopes float32 [M]: of ALiBi, times log2(e), if `ALIBI`
    y_main [M, DV_MAIN], y_tail [M, DV_TAIL]: sums of weighted values, float32
    largest, total float32 [M]: the largest score so far, and the sum of weights relative to it
    lowest: keys before it are not read; `start` is a multiple of `BLOCK_N`
    keys, values: the first slot's element 0 of the KV head; key_scales, value_scales: likewise, if `TOKEN_SCALES`
    table: the sequence's blocks; scale: of scores, times that of the head's keys

    Without `MASKED` every query sees every key of the range. A block whose keys a row does not see changes nothing of
    that row, so that a row's sums do not depend on which rows it shares a tile with.
    """
    dtype: tl.constexpr = q_rows.dtype.element_ty
    for at in range(start, stop, BLOCK_N):
        n = at + tl.arange(0, BLOCK_N)
        read = n < stop
        if WINDOW > 0 or CHUNK > 0:
            read = read & (n >= lowest)
        entries = table + n // BLOCK_SIZE
        blocks = tl.load(entries, mask=read, other=0) if MASKED else tl.load(entries)
        slots = blocks.to(tl.int64) * BLOCK_SIZE + n % BLOCK_SIZE

        k_rows = keys + slots * (KV_HEADS * DK)
        if KEY_STEP > 0:
            scores = tl.zeros([q_rows.shape[0], BLOCK_N], tl.float32)
            for column in tl.static_range(0, DK, KEY_STEP):
                q_part = columns_of(q_rows, read, column, KEY_STEP, DK, False, True)
                k = number_of(columns_of(k_rows, read, column, KEY_STEP, DK, MASKED), FORMAT, dtype)
                scores = tl.dot(q_part, tl.trans(k), scores, input_precision="ieee")
        else:
            k = number_of(columns_of(k_rows, read, 0, DK_MAIN, DK, MASKED), FORMAT, dtype)
            scores = tl.dot(q_main, tl.trans(k), input_precision="ieee")
            if DK_TAIL > 0:
                k = number_of(columns_of(k_rows, read, DK_MAIN, DK_TAIL, DK, MASKED), FORMAT, dtype)
                scores = tl.dot(q_tail, tl.trans(k), scores, input_precision="ieee")
        if TOKEN_SCALES:
            scores = scores * tl.load(key_scales + slots * KV_HEADS, mask=read, other=0.0)[None, :]
        if SOFTCAP > 0:
            # tanh(x) = 2 sigmoid(2x) - 1
            scores = (SOFTCAP * LOG2_E) * (2.0 * tl.sigmoid(scores * (scale * (2.0 / SOFTCAP))) - 1.0)
        else:
            scores = scores * (scale * LOG2_E)
        if ALIBI:
            scores += slopes[:, None] * (n[None, :] - positions[:, None]).to(tl.float32)
        if MASKED:
            scores = tl.where(_visible(n, positions, WINDOW, CHUNK) & read[None, :], scores, float("-inf"))

        higher = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(largest - higher)
        total = total * shrink + tl.sum(weights, 1)
        largest = higher

        v_rows = values + slots * (KV_HEADS * DV)
        v = columns_of(v_rows, read, 0, DV_MAIN, DV, MASKED)
        if TOKEN_SCALES:
            v_scales = tl.load(value_scales + slots * KV_HEADS, mask=read, other=0.0)
            if dtype == tl.float16:
                # Small values would lose bits in a weight, which has as few of them as float16 has below 2^-14.
                v = (v.to(tl.float32) * v_scales[:, None]).to(dtype)
            else:
                v = number_of(v, FORMAT, dtype)
                weights = weights * v_scales[None, :]
        else:
            v = number_of(v, FORMAT, dtype)
        weights = weights.to(dtype)
        y_main = tl.dot(weights, v, y_main * shrink[:, None], input_precision="ieee")
        if DV_TAIL > 0:
            v = columns_of(v_rows, read, DV_MAIN, DV_TAIL, DV, MASKED)
            if TOKEN_SCALES and dtype == tl.float16:
                v = (v.to(tl.float32) * v_scales[:, None]).to(dtype)
            else:
                v = number_of(v, FORMAT, dtype)
            y_tail = tl.dot(weights, v, y_tail * shrink[:, None], input_precision="ieee")
    return y_main, y_tail, largest, total

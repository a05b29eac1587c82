"""Products of activations with weights of 4 and 8 bits, dequantized in registers.

`y[t, n] = sum_k x[t, k] * (number[n, k] - zero[n, g(k)]) * scale[n, g(k)]`, with weights in panels (weights/layout.py).

One kernel serves one token as well as thousands; what differs is the tile and whether the features are split. It
computes `y^T = W x^T`, the weight being the *left* operand of the matrix instruction: that one may lie in registers on
every chip, while Hopper's wgmma takes the right one from shared memory only. So words come from global memory by the
asynchronous copies that hide how long that takes, from shared memory by `ldmatrix`, in the fragments that the
instruction wants, and are unpacked in the registers that it reads. 16-bit weights are never written anywhere: the
packed order gives each number of a word a slice of its own, and which slice is but the upper part of a feature's
number, which chooses a register. Activations, on the right, are read as `[features, tokens]`, rows of memory being
columns, as matrix instructions have it.

A single token, too, is multiplied by matrix instructions, seven or fifteen columns being zeros. To multiply and add in
float32 would take a conversion and an addition for each weight, in all more than 3.2 instructions, and 3.2 is what an
H200 issues for each weight of 4 bits in the time in which it reads one (132 processors * 128 lanes * 1.75 GHz,
4.8 TB/s).

Scales, by how groups lie (`SCALING`):

    channel   one a row: on the result
    after     groups are whole panels, or runs of whole slices: on the product of each run, in float32. The integers
              are exact in 16 bits, so this is as exact as dequantizing in float32
    before    groups are runs of whole slices, or slices of whole groups: on the unpacked weights, rounded to the
              compute type. For many tokens and short groups, where multiplying the products would take longer, and
              for 4-bit floats: times a scale of 8 bits, they need no rounding
    elements  any other group size: before, by a gather of scales

Cost of decode: the weight is read once, `bits / 8 + (2 + asymmetric) / group` bytes for each number: 0.516 for int4 in
groups of 128, 1.8 us for 4096 x 4096 at 4.8 TB/s. Instructions of the loop for each number, in the machine code for
sm_90 and bfloat16 with the default tile of one token, and the share of the bandwidth at which they fill an H200
(`python -m bench.gpu.predictions` counts them, and has the formula):

    format, group         tile      instructions   issue limit    predicted, from 50 MB on
    int4, 128             64 x 8    3.1            101 %          74 %
    int4, 32              128 x 8   3.5            100 %          74 %
    int4, 32, zero points 128 x 8   4.0             92 %          74 %
    int8, a row           64 x 8    3.8            162 %          74 %
    e4m3, a row           64 x 8    4.0            153 %          74 %
    e2m1, 16, e5m3        128 x 8   4.6             75 %          60 %
    e2m1, 32, e8m0        128 x 8   4.3             76 %          61 %

Predicted is 80 % of the smaller of the issue limit and 93 % of 4.8 TB/s, what copies reach. Short groups have tiles of
128 rows, in which what is done once for all rows, or once for a token, is done for more weights. 4-bit floats are
multiplied once, by their scale and the power of two that makes numbers of their bits (dequantize.py); scales come as
codes of 8 bits that a shift and an addition make numbers of. Matrices of 8 MB take 1 us more for the start of the
kernel and 1 us for the sum of the parts: 45 %. To keep memory busy, a processor must have 29 KB under way
(4.8 TB/s * 0.8 us / 132); two programs of 128 rows or four of 64, with three panels each on their way, have 48.

Cost of prefill: `2 T N K` operations. A tile of 128 rows, 128 tokens and 128 features takes 1024 cycles of an H200's
matrix units (4096 operations a cycle), its unpacking 180 (16384 numbers * 1.4 / 128 lanes), scaling products 128, all
else about 120, by the machine code's count. If nothing overlapped, that were 1024 / 1452 = 70 % of peak; two groups of
warps overlap in part, waits and the first and last tiles take some of it back: predicted 65 to 70 % of peak.
"""

# Triton reads the types of a kernel's arguments when it is launched: annotations say only what is a constant.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from inferencex.runtime.backends.triton.kernels.dequantize import (
    float_scales,
    float_zeros,
    folded_scales,
    has_folded_scales,
    scaled_small_float,
    unpack_slice,
)


@triton.jit
def quantized_linear_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    y_ptr,
    tensor_scale,
    T,
    N,
    K,
    x_stride,
    y_stride,
    panels,
    FORMAT: tl.constexpr,
    SCALES: tl.constexpr,
    SCALING: tl.constexpr,
    PANEL: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    CHIP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPLITS: tl.constexpr,
    BAND: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply a tile of rows with a tile of tokens, over all features or one of `SPLITS` parts of the panels.

    x_ptr:      `[T, K]`, rows `x_stride` elements apart; its type is the compute type
    words_ptr:  int16 `[panels, N, slice]`
    scales_ptr: `[groups, N]`; zeros_ptr: uint8 `[groups, N]` or None
    bias_ptr:   `[N]` or None
    y_ptr:      `[T, N]`, rows `y_stride` apart; float32 `[SPLITS, T, N]` when features are split: sums without tensor
                scale and bias, which `add_splits_kernel` finishes
    GROUP:      features that share a scale; of no meaning for one a row
    EVEN_K:     whether K is whole panels
    BAND:       tiles of tokens that run side by side, so that they read the weight from the second-level cache
    STAGES:     panels whose reads are under way at a time

    Grid: `(tiles of rows * tiles of tokens, SPLITS)`.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    SLICES: tl.constexpr = 4 if FORMAT == "int4" or FORMAT == "e2m1" else 2
    SLICE: tl.constexpr = PANEL // SLICES
    # Of a whole panel, scales for products are read a turn ahead: nothing else hides how long that takes.
    IS_AHEAD: tl.constexpr = SCALING == "after" and GROUP % PANEL == 0
    IS_CHANNEL: tl.constexpr = SCALING == "channel"
    IS_SCATTERED: tl.constexpr = SCALING == "elements"
    # Slices side by side that are multiplied at once: those of one group wherever a panel begins; one where every
    # weight has a scale of its own in a register.
    PAIRS: tl.constexpr = 2 if SLICES == 4 and GROUP % (2 * SLICE) == 0 else 1
    RUN: tl.constexpr = 1 if IS_SCATTERED else PAIRS if SCALING == "after" and not IS_AHEAD else SLICES
    first_row, first_token = _tile(T, N, BLOCK_N, BLOCK_T, BAND)
    rows = first_row + tl.arange(0, BLOCK_N)
    row_mask = rows < N
    tokens = tl.arange(0, BLOCK_T)
    token_mask = (first_token + tokens < T)[None, :]
    split = tl.program_id(1)
    first = split * panels // SPLITS
    last = (split + 1) * panels // SPLITS

    wide_n = tl.cast(N, tl.int64)  # offsets into a weight may not fit 32 bits
    words_ptr += first * wide_n * SLICE
    word_places = rows[:, None] * SLICE + tl.arange(0, SLICE)[None, :]
    x_ptr += first_token.to(tl.int64) * x_stride + first * PANEL
    features = tl.arange(0, RUN * SLICE)
    x_places = tokens[None, :] * x_stride + features[:, None]
    scales_ptr += rows
    if zeros_ptr is not None:
        zeros_ptr += rows

    product = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    channel_zero = None
    if IS_CHANNEL and zeros_ptr is not None:
        channel_zero = float_zeros(tl.load(zeros_ptr, mask=row_mask, other=0), DTYPE)[:, None]
    if IS_AHEAD:
        place = (first * PANEL // GROUP) * wide_n
        raw_scale = tl.load(scales_ptr + place, mask=row_mask, other=0)
    for panel in tl.range(first, last, num_stages=STAGES):
        words = tl.load(words_ptr + word_places, mask=row_mask[:, None], other=0)
        zero = channel_zero
        if IS_AHEAD:
            if zeros_ptr is not None:
                place = (panel * PANEL // GROUP) * wide_n
                zero = float_zeros(tl.load(zeros_ptr + place, mask=row_mask, other=0), DTYPE)[:, None]
            scale = float_scales(raw_scale, SCALES)[:, None]
            ahead = tl.minimum(panel + 1, last - 1)
            raw_scale = tl.load(scales_ptr + (ahead * PANEL // GROUP) * wide_n, mask=row_mask, other=0)
        for run in tl.static_range(SLICES // RUN):
            if EVEN_K:
                x = tl.load(x_ptr + run * RUN * SLICE + x_places, mask=token_mask, other=0)
            else:
                is_feature = panel * PANEL + run * RUN * SLICE + features < K
                x = tl.load(x_ptr + run * RUN * SLICE + x_places, mask=token_mask & is_feature[:, None], other=0)
            if SCALING == "after" and not IS_AHEAD:
                place = ((panel * PANEL + run * RUN * SLICE) // GROUP) * wide_n
                scale = float_scales(tl.load(scales_ptr + place, mask=row_mask, other=0), SCALES)[:, None]
                if zeros_ptr is not None:
                    zero = float_zeros(tl.load(zeros_ptr + place, mask=row_mask, other=0), DTYPE)[:, None]
            weight = _run_of_slices(
                words,
                zero,
                scales_ptr,
                zeros_ptr,
                row_mask,
                panel,
                wide_n,
                run * RUN,
                RUN,
                FORMAT,
                SCALES,
                SCALING,
                PANEL,
                GROUP,
                DTYPE,
                CHIP,
            )
            if SCALING == "after":
                product += tl.dot(weight, x, input_precision="ieee") * scale
            else:
                product = tl.dot(weight, x, product, input_precision="ieee")
        words_ptr += wide_n * SLICE
        x_ptr += PANEL
    if IS_CHANNEL:
        product *= float_scales(tl.load(scales_ptr, mask=row_mask, other=0), SCALES)[:, None]
    y_places = (first_token + tokens).to(tl.int64)[None, :] * y_stride + rows[:, None]
    if SPLITS > 1:
        y_ptr += split.to(tl.int64) * T * y_stride
    else:
        product *= tensor_scale
        if bias_ptr is not None:
            product += tl.load(bias_ptr + rows, mask=row_mask, other=0).to(tl.float32)[:, None]
    tl.store(y_ptr + y_places, product.to(y_ptr.dtype.element_ty), mask=row_mask[:, None] & token_mask)


@triton.jit
def _tile(T, N, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BAND: tl.constexpr):
    """Return the first row and token of this program's tile: all rows of a band of tokens before the next band."""
    program = tl.program_id(0)
    row_tiles = tl.cdiv(N, BLOCK_N)
    token_tiles = tl.cdiv(T, BLOCK_T)
    band = program // (BAND * row_tiles)
    wide = tl.minimum(token_tiles - band * BAND, BAND)
    place = program - band * BAND * row_tiles
    return place // wide * BLOCK_N, (band * BAND + place % wide) * BLOCK_T


@triton.jit
def _run_of_slices(
    words,
    zero,
    scales_ptr,
    zeros_ptr,
    row_mask,
    panel,
    wide_n,
    FIRST: tl.constexpr,
    RUN: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALES: tl.constexpr,
    SCALING: tl.constexpr,
    PANEL: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    CHIP: tl.constexpr,
):
    """Return `RUN` slices side by side, from `FIRST` on: `[rows, RUN * slice]` of DTYPE.

    Putting them side by side costs nothing: the slice is the upper part of a feature's number, and in the layouts of
    matrix instructions that chooses a register.
    """
    a = _slice(
        words,
        zero,
        scales_ptr,
        zeros_ptr,
        row_mask,
        panel,
        wide_n,
        FIRST,
        FORMAT,
        SCALES,
        SCALING,
        PANEL,
        GROUP,
        DTYPE,
        CHIP,
    )
    if RUN == 1:
        return a
    else:
        b = _slice(
            words,
            zero,
            scales_ptr,
            zeros_ptr,
            row_mask,
            panel,
            wide_n,
            FIRST + 1,
            FORMAT,
            SCALES,
            SCALING,
            PANEL,
            GROUP,
            DTYPE,
            CHIP,
        )
        if RUN == 2:
            return tl.join(a, b).permute(0, 2, 1).reshape(a.shape[0], 2 * a.shape[1])
        else:
            c = _slice(
                words,
                zero,
                scales_ptr,
                zeros_ptr,
                row_mask,
                panel,
                wide_n,
                FIRST + 2,
                FORMAT,
                SCALES,
                SCALING,
                PANEL,
                GROUP,
                DTYPE,
                CHIP,
            )
            d = _slice(
                words,
                zero,
                scales_ptr,
                zeros_ptr,
                row_mask,
                panel,
                wide_n,
                FIRST + 3,
                FORMAT,
                SCALES,
                SCALING,
                PANEL,
                GROUP,
                DTYPE,
                CHIP,
            )
            return tl.join(tl.join(a, b), tl.join(c, d)).permute(0, 3, 2, 1).reshape(a.shape[0], 4 * a.shape[1])


@triton.jit
def _slice(
    words,
    zero,
    scales_ptr,
    zeros_ptr,
    row_mask,
    panel,
    wide_n,
    J: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALES: tl.constexpr,
    SCALING: tl.constexpr,
    PANEL: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    CHIP: tl.constexpr,
):
    """Return slice `J` of a panel, with its scales where those are applied before products."""
    SLICE: tl.constexpr = words.shape[1]
    if SCALING == "before" and GROUP < SLICE:
        GROUPS: tl.constexpr = SLICE // GROUP
        places = (tl.arange(0, GROUPS) + (panel * PANEL + J * SLICE) // GROUP)[None, :] * wide_n
        raw = tl.load(scales_ptr[:, None] + places, mask=row_mask[:, None], other=0)
        if has_folded_scales(FORMAT, SCALES, DTYPE):
            folded = folded_scales(raw, SCALES, DTYPE)[:, :, None].broadcast_to(words.shape[0], GROUPS, GROUP)
            return scaled_small_float(words, folded.reshape(words.shape), J, DTYPE, CHIP)
        some = float_scales(raw, SCALES).to(DTYPE)
        scale = some[:, :, None].broadcast_to(words.shape[0], GROUPS, GROUP).reshape(words.shape)
        if zeros_ptr is not None:
            few = float_zeros(tl.load(zeros_ptr[:, None] + places, mask=row_mask[:, None], other=0), DTYPE)
            zero = few[:, :, None].broadcast_to(words.shape[0], GROUPS, GROUP).reshape(words.shape)
        return unpack_slice(words, zero, J, FORMAT, DTYPE, CHIP) * scale
    elif SCALING == "before":
        place = ((panel * PANEL + J * SLICE) // GROUP) * wide_n
        raw = tl.load(scales_ptr + place, mask=row_mask, other=0)
        if has_folded_scales(FORMAT, SCALES, DTYPE):
            folded = folded_scales(raw, SCALES, DTYPE)[:, None].broadcast_to(words.shape)
            return scaled_small_float(words, folded, J, DTYPE, CHIP)
        scale = float_scales(raw, SCALES)[:, None]
        if zeros_ptr is not None:
            zero = float_zeros(tl.load(zeros_ptr + place, mask=row_mask, other=0), DTYPE)[:, None]
        return unpack_slice(words, zero, J, FORMAT, DTYPE, CHIP) * scale.to(DTYPE)
    elif SCALING == "elements":
        places = ((tl.arange(0, SLICE) + (panel * PANEL + J * SLICE)) // GROUP)[None, :] * wide_n
        scale = float_scales(tl.load(scales_ptr[:, None] + places, mask=row_mask[:, None], other=0), SCALES)
        if zeros_ptr is not None:
            zero = float_zeros(tl.load(zeros_ptr[:, None] + places, mask=row_mask[:, None], other=0), DTYPE)
        return (unpack_slice(words, zero, J, FORMAT, DTYPE, CHIP).to(tl.float32) * scale).to(DTYPE)
    else:
        return unpack_slice(words, zero, J, FORMAT, DTYPE, CHIP)


@triton.jit
def add_splits_kernel(
    parts_ptr, bias_ptr, y_ptr, tensor_scale, T, N, y_stride, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Add the parts of split features, in order, and finish: `[SPLITS, T, N]` float32 to `[T, N]`.

    Grid: `(T, tiles of N)`, for only the first may be more than 65535. Reads `4 SPLITS T N` bytes, which the
    second-level cache still has for few tokens.
    """
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.program_id(0).to(tl.int64)
    mask = columns < N
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts_ptr + (split * T + token) * N + columns, mask=mask, other=0)
    total *= tensor_scale
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns, mask=mask, other=0).to(tl.float32)
    tl.store(y_ptr + token * y_stride + columns, total.to(y_ptr.dtype.element_ty), mask=mask)

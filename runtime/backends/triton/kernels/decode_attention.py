"""Attention of sequences with one new token each: keys split over programs, then a second pass over their sums.

Flash-decoding (Dao, Haziza, Massa and Sizov 2023): a program takes `SPLIT` consecutive keys of one sequence and KV head
with the query heads that read it as the rows of one tile, filled up to 16 for the tensor cores, and leaves the sums of
weighted values, the largest score and the sum of weights; the second pass adds up what the splits of a sequence left,
in their order. Splits begin at multiples of `SPLIT`, whatever else is in the batch and whatever is the longest sequence
of it, so a sequence's result is always the same.

The grid depends on the number of sequences and on the longest context that is allowed for alone, so a launch can be
recorded in a graph; programs past a sequence's end, or before its window, return at once. Sequences without a context,
which fill up a batch, get zeros. Sequences that leave more sums than memory is reserved for are attended in groups,
one launch after the other, which changes no result: `split_sums.py` says where sums lie.

Bytes of a step and layer: `sum(contexts) * G * (Dk + Dv)` elements of keys and values (with INT8 scales of tokens 8
bytes more per key and KV head), read once; per split `H * (Dv + 2) * 4` bytes are written and read again, which is
`4 * (H / G) / SPLIT` of the keys and values where those are of 16 bits and Dk = Dv, 6 % for groups of 4 and 256 keys,
and stays in L2. Operations: `2 * H * (Dk + Dv)` per key, `2 * max(16, H / G) / itemsize` per byte: far below the ratio
of an H200, 206 at 16 bits.

Expected on an H200 (4.8 TB/s, 132 SMs): 75 to 85 % of bandwidth once the `sequences * G * splits` programs with keys
are two waves of 264 or more, which 17k tokens of context in all give with G = 8 (70 MB of keys and values of 16 bits
in a layer, 18 us at 80 %); 50 to 60 % for one sequence of 8k tokens, where starting two kernels and filling the
pipeline, about 5 us, weigh nearly as much as the 7 us of reading. FP8 and INT8 halve the bytes and reach 60 to 75 % of
bandwidth, for every element then also costs a conversion.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from inferencex.runtime.backends.triton.attention_tiles import DecodeLimits, most_splits, split_keys
from inferencex.runtime.backends.triton.kernels.attention_cases import FAMILIES, attention_cases
from inferencex.runtime.backends.triton.kernels.attention_keys import (
    LOG2_E,
    LOWEST,
    attend_keys,
    columns_of,
    final_factor,
    first_visible,
    store_columns,
)
from inferencex.runtime.backends.triton.kernels.attention_step import (
    AttentionLayer,
    AttentionStep,
    HeadShape,
    family_of,
)
from inferencex.runtime.backends.triton.kernels.decode_tiles import blocks_of, configuration_of, decode_blocks
from inferencex.runtime.backends.triton.kernels.kv_pages import KVPages
from inferencex.runtime.backends.triton.kernels.split_sums import SplitSums, floats_of
from inferencex.runtime.backends.triton.kernels.variant import KernelVariant
from inferencex.runtime.backends.triton.tuning import Config

_REDUCED_BY = ("HEADS", "KV_HEADS", "DV", "WINDOW", "CHUNK", "SINKS", "SCALING")
_LEFT = ("sums", "states")
_REDUCED = (
    *_LEFT,
    "value_scales",
    "sinks",
    "decode_sequences",
    "keys_before",
    "sequence_offsets",
    "context_lengths",
)
_REDUCED_TOGETHER = 4  # splits: what is added up in which order depends on nothing else


@triton.jit
def decode_attention_kernel(  # type: ignore[no-untyped-def]
    q,
    y,
    sums,
    states,
    keys,
    values,
    key_scales,
    value_scales,
    sinks,
    slopes,
    decode_sequences,
    keys_before,
    sequence_offsets,
    context_lengths,
    block_tables,
    q_stride,
    y_stride,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALING: tl.constexpr,
    DK_MAIN: tl.constexpr,
    DK_TAIL: tl.constexpr,
    DV_MAIN: tl.constexpr,
    DV_TAIL: tl.constexpr,
    SPLIT: tl.constexpr,
    ALONE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KEY_STEP: tl.constexpr,
):
    """Attend one split; grid: KV heads times the tiles their group is cut into, splits, sequences.

    `sums [places, H, Dv]` and `states [places, H, 2]` are float32, those of a sequence's splits behind each other from
    `_first_place` on; `SPLIT` is a multiple of `BLOCK_N`. If `ALONE` there is one split, and the result goes to `y`.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    HEAD_TILES: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    at = tl.program_id(2)
    sequence = tl.load(decode_sequences + at)
    context = tl.load(context_lengths + sequence)
    row = tl.load(sequence_offsets + sequence)
    kv_head = tl.program_id(0) // HEAD_TILES
    in_group = tl.program_id(0) % HEAD_TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    wanted = in_group < GROUP
    heads = kv_head * GROUP + tl.minimum(in_group, GROUP - 1)
    y_rows = y + row.to(tl.int64) * y_stride + heads * DV
    nothing = tl.zeros([BLOCK_M, DV_MAIN], tl.float32)
    position = context - 1
    lowest = first_visible(tl.maximum(position, 0), WINDOW, CHUNK)
    split = lowest // SPLIT + tl.program_id(1)
    stop = tl.minimum((split + 1) * SPLIT, context)
    start = tl.maximum(split * SPLIT, lowest // BLOCK_N * BLOCK_N)
    if start >= context:
        if ALONE:
            store_columns(y_rows, nothing, wanted, 0, DV_MAIN, DV)
            if DV_TAIL > 0:
                store_columns(y_rows, tl.zeros([BLOCK_M, DV_TAIL], tl.float32), wanted, DV_MAIN, DV_TAIL, DV)
        return

    q_rows = q + row.to(tl.int64) * q_stride + heads * DK
    q_main = q_rows
    q_tail = q_rows
    if KEY_STEP == 0:
        q_main = columns_of(q_rows, wanted, 0, DK_MAIN, DK, False)
        if DK_TAIL > 0:
            q_tail = columns_of(q_rows, wanted, DK_MAIN, DK_TAIL, DK, False)
    total = tl.zeros([BLOCK_M], tl.float32)
    y_tail = total
    if DV_TAIL > 0:
        y_tail = tl.zeros([BLOCK_M, DV_TAIL], tl.float32)
    slope = total
    if ALIBI:
        slope = tl.load(slopes + heads).to(tl.float32) * LOG2_E
    if SCALING == "head":
        scale = scale * tl.load(key_scales + kv_head)
    if SCALING == "token":
        key_scales += kv_head
        value_scales += kv_head
    y_main, y_tail, largest, total = attend_keys(
        q_main, q_tail, q_rows, position + tl.zeros([BLOCK_M], tl.int32), slope,
        nothing, y_tail, tl.full([BLOCK_M], LOWEST, tl.float32), total, start, stop, lowest,
        keys + kv_head * DK, values + kv_head * DV, key_scales, value_scales,
        block_tables + sequence.to(tl.int64) * table_stride, scale,
        KV_HEADS, DK, DV, BLOCK_SIZE, WINDOW, CHUNK, SOFTCAP, ALIBI, FORMAT, SCALING == "token",
        DK_MAIN, DK_TAIL, DV_MAIN, DV_TAIL, BLOCK_N, KEY_STEP, True,
    )  # fmt: skip
    if ALONE:
        sink = total
        if SINKS:
            sink = tl.load(sinks + heads).to(tl.float32) * LOG2_E
        factor = final_factor(largest, total, sink, SINKS)
        if SCALING == "head":
            factor = factor * tl.load(value_scales + kv_head)
        y_main = y_main * factor[:, None]
        if DV_TAIL > 0:
            y_tail = y_tail * factor[:, None]
    else:
        places = (_first_place(keys_before, at, SPLIT) + tl.program_id(1)) * HEADS + heads
        tl.store(states + 2 * places, largest, mask=wanted)
        tl.store(states + 2 * places + 1, total, mask=wanted)
        y_rows = sums + places * DV
    store_columns(y_rows, y_main, wanted, 0, DV_MAIN, DV)
    if DV_TAIL > 0:
        store_columns(y_rows, y_tail, wanted, DV_MAIN, DV_TAIL, DV)


@triton.jit
def _first_place(keys_before, at, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the place, int64, of the first split of sequence `at`; each has as many as its context takes."""
    return (tl.load(keys_before + at) + at.to(tl.int64) * (SPLIT - 1)) // SPLIT


@triton.jit
def reduce_splits_kernel(  # type: ignore[no-untyped-def]
    y,
    sums,
    states,
    value_scales,
    sinks,
    decode_sequences,
    keys_before,
    sequence_offsets,
    context_lengths,
    y_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DV: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SINKS: tl.constexpr,
    SCALING: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Add up the splits of one head and sequence, `BLOCK_S` at a time in their order; grid: heads, sequences."""
    head, at = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(decode_sequences + at)
    context = tl.load(context_lengths + sequence)
    row = tl.load(sequence_offsets + sequence)
    columns = tl.arange(0, BLOCK_D)
    used = tl.cdiv(context, SPLIT) - first_visible(tl.maximum(context - 1, 0), WINDOW, CHUNK) // SPLIT

    first = _first_place(keys_before, at, SPLIT) * HEADS + head
    y_sum = tl.zeros([BLOCK_D], tl.float32)
    largest = LOWEST
    total = 0.0
    for start in range(0, used, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        places = first + split * HEADS
        found = split < used
        scores = tl.load(states + 2 * places, mask=found, other=LOWEST)
        totals = tl.load(states + 2 * places + 1, mask=found, other=0.0)
        parts = tl.load(
            sums + places[:, None] * DV + columns[None, :], mask=found[:, None] & (columns < DV)[None, :], other=0.0
        )
        higher = tl.maximum(largest, tl.max(scores, 0))
        shrink = tl.exp2(largest - higher)
        factors = tl.exp2(scores - higher)
        total = total * shrink + tl.sum(totals * factors, 0)
        y_sum = y_sum * shrink + tl.sum(parts * factors[:, None], 0)
        largest = higher
    total = tl.where(used > 0, total, 1.0)
    sink = total
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
    factor = final_factor(largest, total, sink, SINKS)
    if SCALING == "head":
        factor = factor * tl.load(value_scales + head // (HEADS // KV_HEADS))
    y_sum = y_sum * factor
    tl.store(y + row.to(tl.int64) * y_stride + head * DV + columns, y_sum.to(y.dtype.element_ty), mask=columns < DV)


def decode_attention(
    q: Tensor, pages: KVPages, step: AttentionStep, layer: AttentionLayer, out: Tensor, config: Config | None = None
) -> None:
    """Attend the sequences of a step that have one new token; the shapes are those that `attention` has checked.

    `config` is what was measured on the device for such layers where it is not given, else the default. Raises
    BackendError where the memory for sums is too small.
    """
    if config is None:
        config = configuration_of(HeadShape.of(layer.num_heads, pages, q.dtype), q.device)
    first = 0
    for count in step.decode_groups:
        _attend_group(q, pages, step, layer, out, config, slice(first, first + count))
        first += count


def _attend_group(
    q: Tensor,
    pages: KVPages,
    step: AttentionStep,
    layer: AttentionLayer,
    out: Tensor,
    config: Config,
    group: slice,
) -> None:
    """Attend some of the sequences with one new token."""
    heads, kv_heads, value_width = layer.num_heads, pages.num_kv_heads, pages.value_width
    shape = HeadShape.of(heads, pages, q.dtype)
    blocks = blocks_of(shape, family_of(q.device))
    split = config["SPLIT"]
    splits = most_splits(step.longest_context, split, layer.window, layer.chunk)
    decode_sequences, keys_before = step.decode_sequences[group], step.keys_before[group]
    sequences = decode_sequences.shape[0]
    sums = states = None  # one split leaves nothing to add up, and writes no sums
    if splits > 1:
        memory = step.sums
        if memory is None:
            limits = DecodeLimits(sequences * step.longest_context, sequences)
            memory = SplitSums.allocate(floats_of(heads, value_width, split, limits), limits, q.device)
        sums, states = memory.parts(heads, value_width, split, sequences)
    constants = layer.constants(pages)
    keys, values = pages.storage()
    grid = (kv_heads * triton.cdiv(heads // kv_heads, blocks.rows), splits, sequences)
    decode_attention_kernel[grid](
        q,
        out,
        sums,
        states,
        keys,
        values,
        pages.key_scales,
        pages.value_scales,
        layer.sinks,
        layer.slopes,
        decode_sequences,
        keys_before,
        step.sequence_offsets,
        step.context_lengths,
        step.block_tables,
        q.stride(0),
        out.stride(0),
        step.block_tables.stride(0),
        layer.scale,
        **constants,
        ALONE=splits == 1,
        BLOCK_M=blocks.rows,
        KEY_STEP=blocks.key_step,
        **config.constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if splits > 1:
        reduce_splits_kernel[(heads, sequences)](
            out,
            sums,
            states,
            pages.value_scales,
            layer.sinks,
            decode_sequences,
            keys_before,
            step.sequence_offsets,
            step.context_lengths,
            out.stride(0),
            **{name: constants[name] for name in _REDUCED_BY},
            SPLIT=split,
            BLOCK_S=_REDUCED_TOGETHER,
            BLOCK_D=triton.next_power_of_2(value_width),
            num_warps=1 if value_width <= 128 else 4,
            num_stages=2,
        )


def variants() -> list[KernelVariant]:
    """Return the kernels for the heads, types and kinds of attention that models have, with each chip's blocks."""
    found = []
    for case in attention_cases():
        group = case.num_heads // case.num_kv_heads
        split = split_keys(case.num_heads, case.num_kv_heads, case.key_width, case.value_width, case.page_itemsize)
        signature = {"sums": "*fp32", "states": "*fp32", "keys_before": "*i64", **case.signature("decode_sequences")}
        aligned = tuple(name for name in signature if name not in ("table_stride", "scale"))
        constants = {**case.constants(), "SPLIT": split}
        for target in case.targets:
            blocks = decode_blocks(FAMILIES[target], case.key_width, case.value_width, group, case.itemsize)
            tile = {"BLOCK_M": blocks.rows, "BLOCK_N": blocks.keys, "KEY_STEP": blocks.key_step}
            for alone in (False, True) if case.name == "heads of 128" else (False,):
                found.append(
                    KernelVariant(
                        decode_attention_kernel,
                        f"decode_attention {case.element}, {case.name}{', one split' if alone else ''}",
                        {name: kind for name, kind in signature.items() if not (alone and name in _LEFT)},
                        {**constants, **tile, "ALONE": alone, **(dict.fromkeys(_LEFT) if alone else {})},
                        blocks.num_warps,
                        blocks.num_stages,
                        tuple(name for name in aligned if not (alone and name in _LEFT)),
                        (target,),
                    )
                )
        if case.name in ("heads of 128", "heads of 128, int8 by head", "heads of 576/512") or case.sinks:
            arguments = {
                "y": signature["y"],
                **{name: kind for name, kind in signature.items() if name in _REDUCED},
                "y_stride": "i32",
            }
            found.append(
                KernelVariant(
                    reduce_splits_kernel,
                    f"reduce_splits {case.element}, {case.name}",
                    arguments,
                    {
                        **{name: None for name in ("value_scales", "sinks") if name not in arguments},
                        **{name: constants[name] for name in (*_REDUCED_BY, "SPLIT")},
                        "BLOCK_S": _REDUCED_TOGETHER,
                        "BLOCK_D": triton.next_power_of_2(case.value_width),
                    },
                    1 if case.value_width <= 128 else 4,
                    2,
                    tuple(arguments),
                )
            )
    return found

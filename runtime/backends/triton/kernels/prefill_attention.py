"""Attention of sequences with several new tokens: tiles of queries over all keys that they see.

A program takes `TILE_ROWS` consecutive new tokens of one sequence and `TILE_HEADS` query heads of one KV head, packed
as the rows of one tile, so that keys and values are read once for all of them (Ainslie et al. 2023, grouped queries;
FlashAttention-2, Dao 2023, section 3). Keys come from the pages, those of this step included, so a prompt's earlier
chunks and a shared prefix are nothing special.

Operations: a new token at position `p` costs `2 * H * (Dk + Dv) * (p + 1)`; a prompt of `L` tokens about
`H * (Dk + Dv) * L^2`. Tiles on the diagonal and rows that fill up `BLOCK_M` add `(BLOCK_M / TILE_HEADS + BLOCK_N) / L`.
Bytes: every tile reads `(p + 1) * (Dk + Dv)` elements of its KV head, mostly from L2, for tiles of a head run side by
side. Operations per byte are those of `2 * BLOCK_M` over the element's size: 128 for a tile of 128 rows in bfloat16,
and L2's rather than memory's bandwidth bounds short tiles.

Expected on an H200 (989 TFLOP/s dense bfloat16), causal prompts of 8k tokens with heads of 128: 35 to 45 % of peak.
What limits it: exponentials (`H * L^2 / 2` of them at 16 a cycle and SM take as long as a third of the products),
and keys gathered through a block table, for which Triton has asynchronous copies but not the tensor memory accelerator.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    Blocks,
    Family,
    HeadShape,
    family_of,
)
from inferencex.runtime.backends.triton.kernels.kv_pages import KVPages
from inferencex.runtime.backends.triton.kernels.variant import KernelVariant
from inferencex.runtime.backends.triton.tuning import Config, configuration, remembered

KERNEL = "prefill_attention"
"""The name under which configurations are kept."""


@triton.jit
def prefill_attention_kernel(  # type: ignore[no-untyped-def]
    q,
    y,
    keys,
    values,
    key_scales,
    value_scales,
    sinks,
    slopes,
    tiles,
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
    PLANNED_ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KEY_STEP: tl.constexpr,
):
    """Attend one tile; grid: tiles, then KV heads times the tiles of heads that their group is cut into.

    A planned tile of `PLANNED_ROWS` is cut once more where a layer wants fewer, `TILE_ROWS`.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    HEAD_TILES: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    CUT: tl.constexpr = (PLANNED_ROWS + TILE_ROWS - 1) // TILE_ROWS
    tile = tl.program_id(0) // CUT
    sequence = tl.load(tiles + 2 * tile)
    planned = tl.load(tiles + 2 * tile + 1)
    first = planned + tl.program_id(0) % CUT * TILE_ROWS
    end = tl.load(sequence_offsets + sequence + 1)
    if first >= tl.minimum(planned + PLANNED_ROWS, end):
        return
    context = tl.load(context_lengths + sequence)
    kv_head = tl.program_id(1) // HEAD_TILES

    m = tl.arange(0, BLOCK_M)
    last = tl.minimum(first + TILE_ROWS, tl.minimum(planned + PLANNED_ROWS, end)) - 1
    in_group = tl.program_id(1) % HEAD_TILES * TILE_HEADS + m % TILE_HEADS
    wanted = (first + m // TILE_HEADS <= last) & (in_group < GROUP)
    # Rows without a query compute what the last one does, and are not stored.
    rows = tl.minimum(first + m // TILE_HEADS, last)
    heads = kv_head * GROUP + tl.minimum(in_group, GROUP - 1)
    positions = context - end + rows
    from_position = context - end + first
    to_position = context - end + last

    q_rows = q + rows.to(tl.int64) * q_stride + heads * DK
    q_main = q_rows
    q_tail = q_rows
    if KEY_STEP == 0:
        q_main = columns_of(q_rows, wanted, 0, DK_MAIN, DK, False)
        if DK_TAIL > 0:
            q_tail = columns_of(q_rows, wanted, DK_MAIN, DK_TAIL, DK, False)
    largest = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    y_main = tl.zeros([BLOCK_M, DV_MAIN], tl.float32)
    y_tail = total
    if DV_TAIL > 0:
        y_tail = tl.zeros([BLOCK_M, DV_TAIL], tl.float32)
    slope = total
    if ALIBI:
        slope = tl.load(slopes + heads).to(tl.float32) * LOG2_E
    if SCALING == "head":
        scale = scale * tl.load(key_scales + kv_head)
    keys += kv_head * DK
    values += kv_head * DV
    if SCALING == "token":
        key_scales += kv_head
        value_scales += kv_head
    table = block_tables + sequence.to(tl.int64) * table_stride

    # Keys before `lowest` no row sees; keys of `all_from .. all_to - 1` all rows do.
    lowest = first_visible(from_position, WINDOW, CHUNK)
    start = lowest // BLOCK_N * BLOCK_N
    all_to = (from_position + 1) // BLOCK_N * BLOCK_N
    all_from = start
    if WINDOW > 0 or CHUNK > 0:
        all_from = tl.cdiv(first_visible(to_position, WINDOW, CHUNK), BLOCK_N) * BLOCK_N
        all_from = tl.minimum(all_from, all_to)
        y_main, y_tail, largest, total = attend_keys(
            q_main, q_tail, q_rows, positions, slope, y_main, y_tail, largest, total, start, all_from, lowest,
            keys, values, key_scales, value_scales, table, scale,
            KV_HEADS, DK, DV, BLOCK_SIZE, WINDOW, CHUNK, SOFTCAP, ALIBI, FORMAT, SCALING == "token",
            DK_MAIN, DK_TAIL, DV_MAIN, DV_TAIL, BLOCK_N, KEY_STEP, True,
        )  # fmt: skip
    y_main, y_tail, largest, total = attend_keys(
        q_main, q_tail, q_rows, positions, slope, y_main, y_tail, largest, total, all_from, all_to, lowest,
        keys, values, key_scales, value_scales, table, scale,
        KV_HEADS, DK, DV, BLOCK_SIZE, WINDOW, CHUNK, SOFTCAP, ALIBI, FORMAT, SCALING == "token",
        DK_MAIN, DK_TAIL, DV_MAIN, DV_TAIL, BLOCK_N, KEY_STEP, False,
    )  # fmt: skip
    y_main, y_tail, largest, total = attend_keys(
        q_main, q_tail, q_rows, positions, slope, y_main, y_tail, largest, total, all_to, to_position + 1, lowest,
        keys, values, key_scales, value_scales, table, scale,
        KV_HEADS, DK, DV, BLOCK_SIZE, WINDOW, CHUNK, SOFTCAP, ALIBI, FORMAT, SCALING == "token",
        DK_MAIN, DK_TAIL, DV_MAIN, DV_TAIL, BLOCK_N, KEY_STEP, True,
    )  # fmt: skip

    sink = total
    if SINKS:
        sink = tl.load(sinks + heads).to(tl.float32) * LOG2_E
    factor = final_factor(largest, total, sink, SINKS)
    if SCALING == "head":
        factor = factor * tl.load(value_scales + kv_head)
    y_rows = y + rows.to(tl.int64) * y_stride + heads * DV
    store_columns(y_rows, y_main * factor[:, None], wanted, 0, DV_MAIN, DV)
    if DV_TAIL > 0:
        store_columns(y_rows, y_tail * factor[:, None], wanted, DV_MAIN, DV_TAIL, DV)


def prefill_blocks(family: Family, key_width: int, value_width: int, itemsize: int) -> Blocks:
    """Return the blocks of prefill for heads of these widths and queries of `itemsize` bytes.

    Five stages are a block of keys and values ahead of the one that is multiplied: their copies wait for entries of
    the block table, which are another load ahead. Queries of float32 spill on AMD's chips with waves of 32.
    """
    widest = max(key_width, value_width)
    if itemsize == 4:
        return Blocks(16, 32, 8, 1, 16)
    if widest > 256:
        stages = {"ampere": 2, "hopper": 5}.get(family, 1)
        return Blocks(16, 16, 4, stages, 64 if family == "rdna" else 0)
    if family == "hopper":
        return Blocks(64, 32, 8, 5) if widest > 192 else Blocks(128, 64, 8, 5)
    if family == "ampere":
        if widest > 128:
            return Blocks(128, 32, 8, 2) if widest <= 192 else Blocks(64, 32, 8, 2)
        return Blocks(128, 64 if widest <= 64 else 32, 8, 5)
    if family == "cdna":
        if widest > 192:
            return Blocks(64, 16, 8, 1, 64)
        if widest > 128:
            return Blocks(64, 32, 4, 1)
        return Blocks(128, 32, 4, 1) if widest > 64 else Blocks(128, 16, 4, 1)
    return Blocks(64, 32, 8, 1) if widest <= 64 else Blocks(32, 32, 8, 1, 64 if widest > 128 else 32)


def _tile_constants(planned_rows: int, group: int, blocks: Blocks) -> dict[str, int]:
    """Return how tiles planned with so many rows are filled with the query heads of a KV head."""
    rows = min(planned_rows, blocks.rows)
    heads = max(1, min(group, blocks.rows // rows))
    return {
        "PLANNED_ROWS": planned_rows,
        "TILE_ROWS": rows,
        "TILE_HEADS": heads,
        "BLOCK_M": max(16, triton.next_power_of_2(rows * heads)),
        "BLOCK_N": blocks.keys,
        "KEY_STEP": blocks.key_step,
    }


def prefill_options(shape: HeadShape, family: Family) -> list[Config]:
    """Return the configurations that are worth measuring, the default first.

    BLOCK_M  rows of a tile: new tokens times query heads  64, 128
    BLOCK_N  keys at a time                                32, 64, 128
    warps    4, 8; stages 2, 3, 5 (CUDA), 1, 2 (AMD)

    Heads whose queries are not kept in registers, wider ones than 256, and float32 on a GPU, have their default alone.
    """
    blocks = _blocks(shape, family)
    found = [Config.of(blocks.num_warps, blocks.num_stages, BLOCK_M=blocks.rows, BLOCK_N=blocks.keys)]
    if blocks.key_step == 0 and max(shape.key_width, shape.value_width) <= 256:
        stages = (2, 3, 5) if family in ("ampere", "hopper") else (1, 2)
        for rows, keys, warps, ahead in itertools.product((64, 128), (32, 64, 128), (4, 8), stages):
            found.append(Config.of(warps, ahead, BLOCK_M=rows, BLOCK_N=keys))
    return list(dict.fromkeys(found))


def _blocks(shape: HeadShape, family: Family) -> Blocks:
    return prefill_blocks(family, shape.key_width, shape.value_width, shape.dtype.itemsize)


@remembered
def configuration_of(shape: HeadShape, device: torch.device) -> Config:
    """Return the configuration on a device: what was measured there, else the default."""
    return configuration(KERNEL, shape.name, prefill_options(shape, family_of(device)), device)


def rows_of_tile(shape: HeadShape, config: Config) -> int:
    """Return the new tokens that fill a tile with all query heads of a KV head."""
    return max(1, config["BLOCK_M"] // shape.group)


def prefill_attention(
    q: Tensor, pages: KVPages, step: AttentionStep, layer: AttentionLayer, out: Tensor, config: Config | None = None
) -> None:
    """Attend the tiles of a step; the shapes are those that `attention` has checked.

    `config` is what was measured on the device for such layers where it is not given, else the default.
    """
    shape = HeadShape.of(layer.num_heads, pages, q.dtype)
    config = configuration_of(shape, q.device) if config is None else config
    key_step = _blocks(shape, family_of(q.device)).key_step
    blocks = Blocks(config["BLOCK_M"], config["BLOCK_N"], config.num_warps, config.num_stages, key_step)
    group = layer.num_heads // pages.num_kv_heads
    tile = _tile_constants(step.tile_rows, group, blocks)
    keys, values = pages.storage()
    grid = (
        step.tiles.shape[0] * triton.cdiv(step.tile_rows, tile["TILE_ROWS"]),
        pages.num_kv_heads * triton.cdiv(group, tile["TILE_HEADS"]),
    )
    prefill_attention_kernel[grid](
        q,
        out,
        keys,
        values,
        pages.key_scales,
        pages.value_scales,
        layer.sinks,
        layer.slopes,
        step.tiles,
        step.sequence_offsets,
        step.context_lengths,
        step.block_tables,
        q.stride(0),
        out.stride(0),
        step.block_tables.stride(0),
        layer.scale,
        **layer.constants(pages),
        **tile,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )


def variants() -> list[KernelVariant]:
    """Return the kernel for the heads, types and kinds of attention that models have, with each chip's blocks."""
    found = []
    for case in attention_cases():
        for target in case.targets:
            blocks = prefill_blocks(FAMILIES[target], case.key_width, case.value_width, case.itemsize)
            rows = max(1, blocks.rows // (case.num_heads // case.num_kv_heads))
            signature = case.signature("tiles")
            found.append(
                KernelVariant(
                    prefill_attention_kernel,
                    f"prefill_attention {case.element}, {case.name}",
                    signature,
                    {**case.constants(), **_tile_constants(rows, case.num_heads // case.num_kv_heads, blocks)},
                    blocks.num_warps,
                    blocks.num_stages,
                    tuple(name for name in signature if name not in ("table_stride", "scale")),
                    (target,),
                )
            )
    return found

"""Products of rows with the weight of each row's expert, over tiles of one expert (expert_routing.py).

As in quantized_linear.py, panels of quantized weights are unpacked in registers as the left operand of the matrix
instruction, and scales of whole slices are applied to products. A step of a few tokens reads the weights of the experts
that were chosen once, which is its cost: `min(E, T * k) * N * K * bits / 8` bytes. Many tokens are `2 * T * k * N * K`
operations.
"""

# Triton reads the types of a kernel's arguments when it is launched: annotations say only what is a constant.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferencex.runtime.backends.triton.kernels.chips import device_target, is_nvidia
from inferencex.runtime.backends.triton.kernels.dequantize import chip, float_scales, float_zeros, unpack_slice
from inferencex.runtime.backends.triton.kernels.expert_routing import Routing, route
from inferencex.runtime.backends.triton.kernels.grouped_tiles import (
    KERNEL,
    GroupedShape,
    candidates,
    configuration_of,
    default_config,
)
from inferencex.runtime.backends.triton.kernels.variant import TARGETS, KernelVariant, Target
from inferencex.runtime.backends.triton.tuning import Config, Tuner
from inferencex.runtime.backends.triton.weights import Format, LinearWeight

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_MEASURED_WITH = (1, 24, 128)
"""Assignments for each expert."""


@triton.jit
def _tile_rows(tiles, rows, TILE: tl.constexpr):
    """Return this program's expert, its assignments, and which of them there are: none where there is no expert."""
    tile = tl.program_id(0)
    expert = tl.load(tiles + tile * 2)
    place = tl.arange(0, TILE)
    is_there = place < tl.load(tiles + tile * 2 + 1)
    row = tl.load(rows + tile * TILE + place, mask=is_there, other=0)
    return expert.to(tl.int64), row.to(tl.int64), is_there


@triton.jit
def _grouped_panels(
    x,
    words,
    scales,
    zeros,
    bias,
    y,
    rows,
    tiles,
    tensor_scale,
    columns,
    depth,
    panels,
    groups,
    shared,
    FORMAT: tl.constexpr,
    SCALES: tl.constexpr,
    SCALING: tl.constexpr,
    PANEL: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN: tl.constexpr,
    CHIP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply a tile of assignments with BLOCK_N rows of its expert's weight; grid `[tiles, ceil(N / BLOCK_N)]`.

    x:      `[M / shared, depth]`: `shared` assignments in a row read the same row
    words:  int16 `[E, panels, N, slice]`; scales, zeros: `[E, groups, N]`; bias: `[E, N]`
    y:      `[M, N]`
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    SLICES: tl.constexpr = 4 if FORMAT == "int4" or FORMAT == "e2m1" else 2
    SLICE: tl.constexpr = PANEL // SLICES
    expert, row, is_there = _tile_rows(tiles, rows, TILE)
    if expert < 0:
        return
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    output_mask = output < columns
    words += expert * panels * columns * SLICE
    word_places = output[:, None] * SLICE + tl.arange(0, SLICE)[None, :]
    feature = tl.arange(0, SLICE)
    x_places = (row // shared)[None, :] * depth + feature[:, None]
    scales += expert * groups * columns + output
    if zeros is not None:
        zeros += expert * groups * columns + output
    product = tl.zeros((BLOCK_N, TILE), tl.float32)
    channel_zero = None
    if SCALING == "channel" and zeros is not None:
        channel_zero = float_zeros(tl.load(zeros, mask=output_mask, other=0), DTYPE)[:, None]
    for panel in tl.range(0, panels, num_stages=STAGES):
        numbers = tl.load(words + word_places, mask=output_mask[:, None], other=0)
        part = product
        zero = channel_zero
        for j in tl.static_range(SLICES):
            first = panel * PANEL + j * SLICE
            if SCALING == "after" and (j == 0 or GROUP % PANEL != 0):
                # One scale for the slices of a panel, or for this slice.
                place = (first // GROUP).to(tl.int64) * columns
                scale = float_scales(tl.load(scales + place, mask=output_mask, other=0), SCALES)[:, None]
                if zeros is not None:
                    zero = float_zeros(tl.load(zeros + place, mask=output_mask, other=0), DTYPE)[:, None]
                part = tl.zeros((BLOCK_N, TILE), tl.float32)
            if EVEN:
                inputs = tl.load(x + first + x_places, mask=is_there[None, :], other=0.0)
            else:
                inside = is_there[None, :] & (first + feature < depth)[:, None]
                inputs = tl.load(x + first + x_places, mask=inside, other=0.0)
            if SCALING == "elements":
                element_places = ((first + feature) // GROUP).to(tl.int64)[None, :] * columns
                if zeros is not None:
                    raw_zero = tl.load(zeros[:, None] + element_places, mask=output_mask[:, None], other=0)
                    zero = float_zeros(raw_zero, DTYPE)
                raw_scale = tl.load(scales[:, None] + element_places, mask=output_mask[:, None], other=0)
                weight = unpack_slice(numbers, zero, j, FORMAT, DTYPE, CHIP).to(tl.float32)
                weight = (weight * float_scales(raw_scale, SCALES)).to(DTYPE)
            else:
                weight = unpack_slice(numbers, zero, j, FORMAT, DTYPE, CHIP)
            part = tl.dot(weight, inputs, part, input_precision="ieee")
            if SCALING == "after" and (j == SLICES - 1 or GROUP % PANEL != 0):
                product += part * scale
        if SCALING != "after":
            product = part
        words += columns.to(tl.int64) * SLICE
    if SCALING == "channel":
        product *= float_scales(tl.load(scales, mask=output_mask, other=0), SCALES)[:, None]
    product *= tensor_scale
    if bias is not None:
        product += tl.load(bias + expert * columns + output, mask=output_mask, other=0).to(tl.float32)[:, None]
    places = row[None, :] * columns + output[:, None]
    tl.store(y + places, product.to(DTYPE), mask=output_mask[:, None] & is_there[None, :])


@triton.jit
def _grouped_plain(
    x,
    weight,
    bias,
    y,
    rows,
    tiles,
    columns,
    depth,
    shared,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Multiply a tile of assignments with BLOCK_N rows of its expert's weight `[E, N, depth]`, as `_grouped_panels`."""
    expert, row, is_there = _tile_rows(tiles, rows, TILE)
    if expert < 0:
        return
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    output_mask = output < columns
    feature = tl.arange(0, BLOCK_K)
    x_tile = x + (row // shared)[:, None] * depth + feature[None, :]
    weight_row = expert * columns + tl.where(output_mask, output, 0)
    weight_tile = weight + weight_row[None, :] * depth + feature[:, None]
    total = tl.zeros((TILE, BLOCK_N), tl.float32)
    for start in range(0, depth, BLOCK_K):
        if EVEN:
            a = tl.load(x_tile + start, mask=is_there[:, None], other=0.0)
            b = tl.load(weight_tile + start)
        else:
            inside = start + feature < depth
            a = tl.load(x_tile + start, mask=is_there[:, None] & inside[None, :], other=0.0)
            b = tl.load(weight_tile + start, mask=inside[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + expert * columns + output, mask=output_mask, other=0).to(tl.float32)[None, :]
    places = row[:, None] * columns + output[None, :]
    tl.store(y + places, total.to(y.dtype.element_ty), mask=is_there[:, None] & output_mask[None, :])


def tile_of(assignments: int, *weights: LinearWeight) -> int:
    """Return how many assignments a tile has: about what an expert gets, within what matrix instructions take.

    Scales that are gathered element by element leave no registers for larger tiles than 16.
    """
    average = assignments // weights[0].experts
    is_gathered = any(weight.format != "plain" and scaling_of(weight) == "elements" for weight in weights)
    if average <= 16 or is_gathered:
        return 16
    return 32 if average <= 32 else 64


def scaling_of(weight: LinearWeight) -> str:
    """Return where scales are applied (quantized_linear.py): on products wherever groups allow it."""
    if weight.is_per_channel:
        return "channel"
    return "after" if weight.group_size % weight.slice_features == 0 else "elements"


def grouped_linear(x: Tensor, weight: LinearWeight, routing: Routing, assignments: int, *, shared: int = 1) -> Tensor:
    """Return every assignment's row through its expert's linear layer, with bias: `[M, N]` of the type of `x`.

    x:      `[M / shared, K]`
    weight: a stack `[E, N, K]`
    shared: assignments in a row that read the same row of `x`

    Rows of assignments to no expert are not written.
    """
    if x.dim() != 2 or not x.is_contiguous() or list(x.shape) != [assignments // shared, weight.in_features]:
        raise ValueError(f"rows {list(x.shape)}; expected contiguous {[assignments // shared, weight.in_features]}")
    if weight.format == "plain" and weight.values.dtype != x.dtype:
        raise ValueError(f"weights of {weight.values.dtype} for rows of {x.dtype}")
    if weight.format != "plain" and (weight.layout != "panels" or weight.scales is None):
        raise ValueError(f"a stack {weight.format} {list(weight.shape)} in {weight.layout}; expected panels")
    y = torch.empty((assignments, weight.out_features), dtype=x.dtype, device=x.device)
    shape = GroupedShape.of(weight, x.dtype, routing.tile)
    launch(x, weight, routing, y, configuration_of(shape, x.device), shared=shared)
    return y


def launch(x: Tensor, weight: LinearWeight, routing: Routing, y: Tensor, config: Config, *, shared: int = 1) -> None:
    """Multiply in a configuration; `grouped_linear` has checked what must fit."""
    columns, depth = weight.out_features, weight.in_features
    grid = (routing.tiles.shape[0], triton.cdiv(columns, config["BLOCK_N"]))
    if weight.format == "plain":
        _grouped_plain[grid](
            x,
            weight.values,
            weight.bias,
            y,
            routing.rows,
            routing.tiles,
            columns,
            depth,
            shared,
            TILE=routing.tile,
            BLOCK_N=config["BLOCK_N"],
            BLOCK_K=config["BLOCK_K"],
            EVEN=depth % config["BLOCK_K"] == 0,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        return
    assert weight.scales is not None
    _grouped_panels[grid](
        x,
        weight.values,
        weight.scales,
        weight.zero_points,
        weight.bias,
        y,
        routing.rows,
        routing.tiles,
        weight.tensor_scale,
        columns,
        depth,
        weight.values.shape[-3],
        weight.scales.shape[-2],
        shared,
        FORMAT=weight.format,
        SCALES=weight.scale_format,
        SCALING=scaling_of(weight),
        PANEL=weight.panel,
        GROUP=weight.group_size,
        TILE=routing.tile,
        BLOCK_N=config["BLOCK_N"],
        EVEN=depth % weight.panel == 0,
        CHIP=chip(),
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def tune_grouped_linear(tuner: Tuner, weight: LinearWeight, dtype: torch.dtype) -> None:
    """Measure products with a stack in each size of tiles where it lies.

    Tiles of 16 are measured with one assignment for each expert, which is decoding: reading weights is what it costs.
    Larger ones get as many for each expert as make `tile_of` choose them.
    """
    device, count = weight.values.device, weight.experts
    for tile in dict.fromkeys(tile_of(each * count, weight) for each in _MEASURED_WITH):
        average = next(each for each in _MEASURED_WITH if tile_of(each * count, weight) == tile)
        ids = torch.arange(average * count, device=device) % count
        routing = route(ids, count, tile)
        x = torch.randn((ids.numel(), weight.in_features), device=device).to(dtype)
        y = torch.empty((ids.numel(), weight.out_features), dtype=dtype, device=device)
        shape = GroupedShape.of(weight, dtype, tile)
        tuner.tune(
            KERNEL,
            shape.name,
            candidates(shape, device_target(device)),
            lambda config, x=x, routing=routing, y=y: launch(x, weight, routing, y, config),  # type: ignore[misc]
        )


def variants() -> list[KernelVariant]:
    """Return what launches compile."""
    found = []
    for target in TARGETS:
        for dtype in ("bf16", "fp16"):
            for tile in (16, 32, 64):
                found.append(_plain_variant(target, dtype, tile))
                found.append(_panels_variant(target, dtype, tile, "int4", 128, "after", has_zeros=False))
                found.append(_panels_variant(target, dtype, tile, "int8", 1 << 20, "channel", has_zeros=False))
        for tile in (16, 64):
            found.append(_panels_variant(target, "bf16", tile, "int4", 32, "after", has_zeros=True))
            found.append(_panels_variant(target, "bf16", tile, "int8", 128, "after", has_zeros=False))
            found.append(_panels_variant(target, "bf16", tile, "e2m1", 32, "after", has_zeros=False))
            found.append(_panels_variant(target, "bf16", tile, "e4m3", 1 << 20, "channel", has_zeros=False))
        found.append(_panels_variant(target, "bf16", 16, "int4", 48, "elements", has_zeros=True))
        found.append(_panels_variant(target, "bf16", 16, "e2m1", 16, "elements", has_zeros=False))
        found.append(_plain_variant(target, "fp32", 16))
    return found


def _plain_variant(target: Target, dtype: str, tile: int) -> KernelVariant:
    shape = GroupedShape("plain", 0, True, _DTYPES[dtype], 8, 4096, 4096, tile)
    config = default_config(shape, target)
    pointers = {name: f"*{dtype}" for name in ("x", "weight", "bias", "y")} | {"rows": "*i32", "tiles": "*i32"}
    return KernelVariant(
        _grouped_plain,
        f"grouped_linear {dtype}, tiles of {tile}",
        {**pointers, "columns": "i32", "depth": "i32", "shared": "i32"},
        {"TILE": tile, "BLOCK_N": config["BLOCK_N"], "BLOCK_K": config["BLOCK_K"], "EVEN": True},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aligned=(*pointers, "columns", "depth"),
        targets=(target,),
    )


def _panels_variant(
    target: Target, dtype: str, tile: int, weight_format: Format, group: int, scaling: str, *, has_zeros: bool
) -> KernelVariant:
    kind = "cuda" if is_nvidia(target) else "hip"
    shape = GroupedShape(weight_format, group, not has_zeros, _DTYPES[dtype], 8, 4096, 4096, tile)
    config = default_config(shape, target)
    pointers = {"x": f"*{dtype}", "words": "*i16", "scales": "*u8" if weight_format == "e2m1" else "*fp16"}
    if has_zeros:
        pointers["zeros"] = "*u8"
    pointers |= {"bias": f"*{dtype}", "y": f"*{dtype}", "rows": "*i32", "tiles": "*i32"}
    numbers = dict.fromkeys(("columns", "depth", "panels", "groups", "shared"), "i32")
    return KernelVariant(
        _grouped_panels,
        f"grouped_linear {weight_format} by {scaling} {dtype}{', zero points' if has_zeros else ''}, tiles of {tile}",
        {**pointers, "tensor_scale": "fp32", **numbers},
        {
            **({} if has_zeros else {"zeros": None}),
            "FORMAT": weight_format,
            "SCALES": "float" if weight_format != "e2m1" else "e8m0" if group == 32 else "e5m3",
            "SCALING": scaling,
            "PANEL": 64 if group == 32 and weight_format == "int4" else 128,
            "GROUP": group,
            "TILE": tile,
            "BLOCK_N": config["BLOCK_N"],
            "EVEN": True,
            "CHIP": kind,
            "STAGES": config.num_stages,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aligned=(*pointers, "columns", "depth"),
        targets=(target,),
    )

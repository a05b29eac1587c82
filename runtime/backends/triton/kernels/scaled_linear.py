"""Linear layers of 8-bit activations and 8-bit weights: W8A8 with int8 or FP8 products and scales applied behind.

`y = (x . w) * x_scale[row] * weight_scale[column] + bias`: within a row and a column nothing but the 8-bit numbers is
multiplied, so the tensor cores run on them as they are stored. Int8 sums are exact int32. FP8 is E4M3 with float32
sums; chips whose dots do not know it (sm_80, gfx1100, and gfx942, which has another E4M3) get float16, which holds it
exactly.

`[T, K] x [N, K]` takes `2 * T * K * N` operations and reads `N * K + T * K` bytes: below some hundred tokens the bytes
of the weights are the cost. A few tokens have too few tiles to fill a chip, so the features are split among programs,
whose partial sums a second kernel adds in order.
"""

# Triton reads the types of a kernel's arguments when it is launched: annotations say only what is a constant.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferencex.runtime.backends.triton.kernels.chips import device_target, multiplies_fp8, processors
from inferencex.runtime.backends.triton.kernels.dequantize import float_scales
from inferencex.runtime.backends.triton.kernels.quantize_rows import (
    as_bytes,
    check_quantized_type,
    decode_e4m3,
    quantize_rows,
)
from inferencex.runtime.backends.triton.kernels.scaled_linear_tiles import (
    KERNEL,
    ScaledShape,
    candidates,
    configuration_of,
    default_config,
)
from inferencex.runtime.backends.triton.kernels.variant import TARGETS, KernelVariant, Target
from inferencex.runtime.backends.triton.tuning import Config, Tuner, bucket_of
from inferencex.runtime.backends.triton.weights import LinearWeight

_LONGEST_INT8_ROW = ((1 << 31) - 1) // (128 * 128)  # whose sum of products fits int32
_FINISHED_AT_ONCE = 1024
_BAND = 8


@triton.jit
def _scaled(
    total,
    x_scale,
    weight_scales,
    tensor_scale,
    weight_sums,
    bias,
    column,
    zero_point,
    mask,
    HAS_ZERO: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Turn sums of products `[rows, columns]` into float32 results.

    With activations `x_scale * (q - zero_point)` the sum of products has `zero_point` times the weights' sum too much.
    """
    if HAS_ZERO:
        total -= zero_point * tl.load(weight_sums + column, mask=mask, other=0)[None, :]
    weight_scale = float_scales(tl.load(weight_scales + column, mask=mask, other=0), SCALES) * tensor_scale
    result = total.to(tl.float32) * weight_scale[None, :] * x_scale
    if bias is not None:
        result += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)[None, :]
    return result


@triton.jit
def _scaled_linear(
    x,
    weight,
    x_scales,
    weight_scales,
    tensor_scale,
    weight_sums,
    bias,
    y,
    rows,
    columns,
    depth,
    zero_point,
    PER_ROW: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    SCALES: tl.constexpr,
    UPCASTS: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Multiply `x [rows, depth]` with `weight [columns, depth]`, both row-major.

    A program is a tile `[BLOCK_M, BLOCK_N]` of the result, tiles in bands of GROUP rows so that neighbours in time
    share weights in the cache; grid `[tiles, SPLITS]`. With SPLITS > 1 each writes the sum over its part of the
    features to `y`, which is then int32 or float32 `[SPLITS, rows, columns]`.

    UPCASTS: `x` and `weight` are the bits of E4M3, and are multiplied as float16
    EVEN:    BLOCK_K divides the depth
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    down, across = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    tile_m, tile_n = tl.swizzle2d(tile // across, tile % across, down, across, GROUP)
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row_inside, column_inside = row < rows, column < columns
    feature = tl.arange(0, BLOCK_K)
    # Rows beyond the border are read from inside it; what comes of them is not written.
    x_tile = x + tl.where(row_inside, row, 0).to(tl.int64)[:, None] * depth + feature[None, :]
    weight_tile = weight + tl.where(column_inside, column, 0).to(tl.int64)[None, :] * depth + feature[:, None]

    steps = tl.cdiv(tl.cdiv(depth, BLOCK_K), SPLITS)
    first = split * steps
    last = tl.minimum(first + steps, tl.cdiv(depth, BLOCK_K))
    if x.dtype.element_ty == tl.int8:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(first, last):
        start = step * BLOCK_K
        if EVEN:
            a = tl.load(x_tile + start)
            b = tl.load(weight_tile + start)
        else:
            inside = start + feature < depth
            # Every type's zero has no bits.
            a = tl.load(x_tile + start, mask=inside[None, :], other=0)
            b = tl.load(weight_tile + start, mask=inside[:, None], other=0)
        if UPCASTS:
            total = tl.dot(decode_e4m3(a), decode_e4m3(b), total)
        elif x.dtype.element_ty == tl.int8:
            total = tl.dot(a, b, total, out_dtype=tl.int32)
        else:
            # The tensor cores of sm_90 keep 14 bits of a sum of FP8 products; every BLOCK_K of them are added apart.
            total = tl.dot(a, b, total, max_num_imprecise_acc=BLOCK_K)

    mask = row_inside[:, None] & column_inside[None, :]
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    if SPLITS == 1:
        x_scale = tl.load(x_scales + row, mask=row_inside, other=0.0)[:, None] if PER_ROW else tl.load(x_scales)
        result = _scaled(
            total,
            x_scale,
            weight_scales,
            tensor_scale,
            weight_sums,
            bias,
            column,
            zero_point,
            column_inside,
            HAS_ZERO,
            SCALES,
        )
        tl.store(y + place, result.to(y.dtype.element_ty), mask=mask)
    else:
        tl.store(y + split.to(tl.int64) * rows * columns + place, total, mask=mask)


@triton.jit
def _finish(
    partials,
    x_scales,
    weight_scales,
    tensor_scale,
    weight_sums,
    bias,
    y,
    rows,
    columns,
    zero_point,
    PER_ROW: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    SCALES: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the parts `[SPLITS, rows, columns]` in order, and scale; a program is BLOCK columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros((BLOCK,), partials.dtype.element_ty)
    for split in tl.static_range(SPLITS):
        total += tl.load(partials + (split * rows + row) * columns + column, mask=inside, other=0)
    x_scale = tl.load(x_scales + row) if PER_ROW else tl.load(x_scales)
    result = _scaled(
        total[None, :],
        x_scale,
        weight_scales,
        tensor_scale,
        weight_sums,
        bias,
        column,
        zero_point,
        inside,
        HAS_ZERO,
        SCALES,
    )
    tl.store(y + row * columns + column[None, :], result.to(y.dtype.element_ty), mask=inside[None, :])


def sums_of_rows(weight: LinearWeight) -> Tensor:
    """Return the sums of an int8 weight's rows, int32 `[N]`, which activations with a zero point need."""
    return weight.values.sum(1, dtype=torch.int32)


def scaled_linear(
    values: Tensor,
    scales: Tensor,
    weight: LinearWeight,
    out_dtype: torch.dtype,
    *,
    zero_point: int = 0,
    weight_sums: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the linear layer of quantized activations: `[T, N]` of type `out_dtype`.

    values:      int8 or float8_e4m3fn `[T, K]`
    scales:      float32: `[T]`, or one number for all rows
    weight:      numbers of the type of `values`, in rows, with one scale a row
    zero_point:  of int8 activations; `weight_sums` must then be what `sums_of_rows` gives
    """
    rows, columns = _checked(values, scales, weight, zero_point, weight_sums, out, out_dtype)
    y = torch.empty((rows, columns), dtype=out_dtype, device=values.device) if out is None else out
    if not y.numel():
        return y
    shape = shape_of(weight, out_dtype)
    config = configuration_of(shape, bucket_of(rows), values.device)
    launch(values, scales, weight, y, shape, config, zero_point=zero_point, weight_sums=weight_sums)
    return y


def shape_of(weight: LinearWeight, dtype: torch.dtype) -> ScaledShape:
    """Return the shape of products with `weight` that give `dtype`."""
    columns, depth = weight.shape[-2:]
    if weight.values.dtype == torch.int8:
        return ScaledShape("int8", False, dtype, columns, depth)
    return ScaledShape("e4m3", not multiplies_fp8(weight.values.device), dtype, columns, depth)


def launch(
    values: Tensor,
    scales: Tensor,
    weight: LinearWeight,
    y: Tensor,
    shape: ScaledShape,
    config: Config,
    *,
    zero_point: int = 0,
    weight_sums: Tensor | None = None,
) -> None:
    """Multiply in a configuration; `scaled_linear` has checked what must fit."""
    rows, columns, depth = values.shape[0], shape.columns, shape.depth
    splits = config["SPLITS"]
    grid = triton.cdiv(rows, config["BLOCK_M"]) * triton.cdiv(columns, config["BLOCK_N"])
    sums_type = torch.int32 if values.dtype == torch.int8 else torch.float32
    written = torch.empty((splits, rows, columns), dtype=sums_type, device=values.device) if splits > 1 else y
    scaling = (scales, weight.scales, weight.tensor_scale, weight_sums if zero_point else None, weight.bias)
    terms = {"PER_ROW": scales.numel() == rows, "HAS_ZERO": zero_point != 0, "SCALES": weight.scale_format}
    _scaled_linear[(grid, splits)](
        as_bytes(values) if shape.upcasts else values,
        as_bytes(weight.values) if shape.upcasts else weight.values,
        *scaling,
        written,
        rows,
        columns,
        depth,
        zero_point,
        **terms,
        UPCASTS=shape.upcasts,
        EVEN=depth % config["BLOCK_K"] == 0,
        **config.constants,
        GROUP=_BAND,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if splits > 1:
        _finish[(rows, triton.cdiv(columns, _FINISHED_AT_ONCE))](
            written, *scaling, y, rows, columns, zero_point, **terms, SPLITS=splits, BLOCK=_FINISHED_AT_ONCE
        )


def tune_scaled_linear(tuner: Tuner, weight: LinearWeight, dtype: torch.dtype, tokens: Sequence[int]) -> None:
    """Measure products of `weight` with each number of tokens where it lies."""
    shape, device = shape_of(weight, dtype), weight.values.device
    for count in dict.fromkeys(map(bucket_of, tokens)):
        values, scales = quantize_rows(torch.randn((count, shape.depth), device=device), weight.values.dtype)
        y = torch.empty((count, shape.columns), dtype=dtype, device=device)
        name = shape.class_for(count)
        tuner.tune(
            KERNEL,
            name,
            candidates(shape, count, device_target(device), processors(device)),
            lambda config, x=values, scales=scales, y=y: launch(  # type: ignore[misc]
                x, scales, weight, y, shape, config
            ),
        )


def _checked(
    values: Tensor,
    scales: Tensor,
    weight: LinearWeight,
    zero_point: int,
    weight_sums: Tensor | None,
    out: Tensor | None,
    dtype: torch.dtype,
) -> tuple[int, int]:
    check_quantized_type(values.dtype)
    columns, depth = weight.shape[-2:]
    if weight.layout != "rows" or weight.experts != 1 or not weight.is_per_channel or weight.zero_points is not None:
        raise ValueError(f"a weight {weight.format} {list(weight.shape)} in {weight.layout}; expected 8-bit rows")
    if values.dim() != 2 or values.shape[1] != depth or values.dtype != weight.values.dtype:
        raise ValueError(
            f"activations {values.dtype} {list(values.shape)}; expected {weight.values.dtype} [rows, {depth}]"
        )
    if not values.is_contiguous():
        raise ValueError(f"activations with strides {values.stride()}; expected contiguous rows")
    if values.dtype == torch.int8 and depth > _LONGEST_INT8_ROW:
        raise ValueError(f"{depth} features; sums of more than {_LONGEST_INT8_ROW} int8 products overflow")
    rows = values.shape[0]
    if scales.dtype != torch.float32 or scales.numel() not in (1, rows) or not scales.is_contiguous():
        raise ValueError(f"scales {scales.dtype} {list(scales.shape)}; expected float32, one or {rows}")
    if zero_point and (values.dtype != torch.int8 or weight_sums is None or list(weight_sums.shape) != [columns]):
        raise ValueError(f"a zero point of {zero_point} takes int8 activations and the sums of the {columns} rows")
    if out is not None and (list(out.shape) != [rows, columns] or out.dtype != dtype or not out.is_contiguous()):
        raise ValueError(f"out is {out.dtype} {list(out.shape)}; expected contiguous {dtype} [{rows}, {columns}]")
    return rows, columns


def variants() -> list[KernelVariant]:
    """Return what launches compile."""
    found = []
    for target in TARGETS:
        for kind in ("int8", "fp8"):
            for result in ("bf16", "fp16"):
                found += [_variant(target, kind, result, rows, 1) for rows in (16, 32, 64, 128)]
            found.append(_variant(target, kind, "bf16", 16, 8))
            found.append(_variant(target, kind, "bf16", 64, 4))
    found.append(_variant("sm_90", "int8", "bf16", 128, 1, has_zero=True))
    found.append(_variant("gfx942", "int8", "bf16", 128, 1, has_zero=True))
    for kind in ("int8", "fp8"):
        for result in ("bf16", "fp16", "fp32"):
            found.append(_finish_variant(kind, result))
    return found


def _variant(
    target: Target, kind: str, result: str, rows: int, splits: int, *, has_zero: bool = False
) -> KernelVariant:
    upcasts = kind == "fp8" and target != "sm_90"
    shape = ScaledShape("int8" if kind == "int8" else "e4m3", upcasts, torch.bfloat16, 4096, 4096)
    config = default_config(shape, rows, target, 132)
    stored = "*i8" if kind == "int8" else "*u8" if upcasts else "*fp8e4nv"
    written = f"*{result}" if splits == 1 else "*i32" if kind == "int8" else "*fp32"
    pointers = {"x": stored, "weight": stored, "x_scales": "*fp32", "weight_scales": "*fp16"}
    if has_zero:
        pointers["weight_sums"] = "*i32"
    pointers |= {"bias": f"*{result}", "y": written}
    return KernelVariant(
        _scaled_linear,
        f"scaled_linear {kind} {result}, {rows} rows, {splits} splits{', zero point' if has_zero else ''}",
        {**pointers, "tensor_scale": "fp32", "rows": "i32", "columns": "i32", "depth": "i32", "zero_point": "i32"},
        {
            **({} if has_zero else {"weight_sums": None}),
            "PER_ROW": True,
            "HAS_ZERO": has_zero,
            "SCALES": "float",
            "UPCASTS": upcasts,
            "SPLITS": splits,
            "EVEN": True,
            **{name: size for name, size in config.constants.items() if name != "SPLITS"},
            "GROUP": _BAND,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aligned=(*pointers, "columns", "depth"),
        targets=(target,),
    )


def _finish_variant(kind: str, result: str) -> KernelVariant:
    pointers = {
        "partials": "*i32" if kind == "int8" else "*fp32",
        "x_scales": "*fp32",
        "weight_scales": "*fp16",
        "bias": f"*{result}",
        "y": f"*{result}",
    }
    return KernelVariant(
        _finish,
        f"scaled_linear {kind} {result}, sum of 8 splits",
        {**pointers, "tensor_scale": "fp32", "rows": "i32", "columns": "i32", "zero_point": "i32"},
        {
            "weight_sums": None,
            "PER_ROW": True,
            "HAS_ZERO": False,
            "SCALES": "float",
            "SPLITS": 8,
            "BLOCK": _FINISHED_AT_ONCE,
        },
        aligned=(*pointers, "columns"),
    )

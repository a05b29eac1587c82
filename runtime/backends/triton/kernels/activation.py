"""Activations of feed-forward layers, gated or not, and the quantization of what they give.

Elementwise: `[T, 2F]` is read once and `[T, F]` written, `6 * T * F` bytes with 16-bit elements. Arithmetic is float32.
"""

# Triton reads the types of a kernel's arguments when it is launched: annotations say only what is a constant.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferencex.runtime.backends.triton.kernels.quantize_rows import (
    Quantization,
    Quantized,
    as_bytes,
    quantize_by,
    quantize_row,
    row_launch,
)
from inferencex.runtime.backends.triton.kernels.variant import KernelVariant

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid")
GATED_ACTIVATIONS = (*ACTIVATIONS, "swiglu_clamped")
LAYOUTS = ("concat", "interleaved")

_WIDEST_TILE = 2048
_WIDEST_HELD = 16384  # wider rows are quantized by a kernel of its own: these would take too many registers


@triton.jit
def _sigmoid(x):
    # exp overflows to infinity for very negative numbers, whose sigmoid is then 0, as it should be.
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Apply a named activation to float32."""
    if ACTIVATION == "silu":
        y = x * _sigmoid(x)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 is the sigmoid of 2 z.
        y = x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "relu":
        y = tl.maximum(x, 0.0)
    elif ACTIVATION == "relu2":
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    else:
        tl.static_assert(ACTIVATION == "sigmoid")
        y = _sigmoid(x)
    return y


@triton.jit
def apply_gate(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    """Return the dialect's `GatedActivation` of float32 gates and what they let through; `limit` 0 is none."""
    if ACTIVATION == "swiglu_clamped":
        bound = tl.where(limit == 0.0, float("inf"), limit)
        gate = tl.minimum(gate, bound)
        up = tl.minimum(tl.maximum(up, -bound), bound)
        y = (up + 1.0) * gate * _sigmoid(alpha * gate)
    else:
        y = activate(gate, ACTIVATION) * up
    return y


@triton.jit
def _activation(
    x,
    y,
    values,
    scales,
    x_stride,
    features,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    QUANTIZES: tl.constexpr,
    TO_FP8: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program is BLOCK features of a row, all of them where QUANTIZES is "rows": grid `[T, ceil(F / BLOCK)]`.

    y:         where results go; None where nobody reads them unquantized
    QUANTIZES: "" for not at all; "rows", `values` and `scales` are written; "fixed", `values` are, by the one scale
               that `scales` holds
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < features
    start = x + row * x_stride
    if GATED and INTERLEAVED:
        # Adjacent elements come in one vector, and are parted in registers.
        wide = tl.program_id(1) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
        pairs = tl.load(start + wide, mask=wide < 2 * features, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(pairs, (BLOCK, 2)))
        result = apply_gate(gate, up, alpha, limit, ACTIVATION)
    elif GATED:
        gate = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(start + features + column, mask=inside, other=0.0).to(tl.float32)
        result = apply_gate(gate, up, alpha, limit, ACTIVATION)
    else:
        result = activate(tl.load(start + column, mask=inside, other=0.0).to(tl.float32), ACTIVATION)
    rounded = result.to(x.dtype.element_ty)
    place = row * features + column
    if y is not None:
        tl.store(y + place, rounded, mask=inside)
    if QUANTIZES == "rows":
        # Padding is 0 for every activation of a gate; the sigmoid of 0 is not.
        quantized, scale = quantize_row(tl.where(inside, rounded.to(tl.float32), 0.0), TO_FP8)
        tl.store(values + place, quantized, mask=inside)
        tl.store(scales + row, scale)
    elif QUANTIZES == "fixed":
        tl.store(values + place, quantize_by(rounded.to(tl.float32), tl.load(scales), 0, TO_FP8), mask=inside)


def gated_activation(
    x: Tensor,
    activation: str,
    layout: str = "concat",
    alpha: float = 1.0,
    limit: float = 0.0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return `[T, F]` of `[T, 2F]`, whose rows may lie apart: the dialect's `GatedActivation`."""
    _check_gate(activation, layout)
    return _whole(x, activation, layout, alpha, limit, out)


def gated_activation_quantized(
    x: Tensor,
    quantization: Quantization,
    activation: str,
    layout: str = "concat",
    alpha: float = 1.0,
    limit: float = 0.0,
    *,
    keep: bool = False,
) -> tuple[Quantized, Tensor | None]:
    """Return the gated activation of `[T, 2F]` in 8 bits, and, if `keep`, as it is."""
    _check_gate(activation, layout)
    return _quantized(x, quantization, activation, layout, alpha, limit, keep)


def activation(x: Tensor, activation: str, *, out: Tensor | None = None) -> Tensor:
    """Return an activation of every element of `[T, F]`, whose rows may lie apart."""
    _check_plain(activation)
    return _whole(x, activation, None, 1.0, 0.0, out)


def activation_quantized(x: Tensor, quantization: Quantization, activation: str) -> Quantized:
    """Return an activation of every element of `[T, F]` in 8 bits."""
    _check_plain(activation)
    return _quantized(x, quantization, activation, None, 1.0, 0.0, False)[0]


def _whole(x: Tensor, activation: str, layout: str | None, alpha: float, limit: float, out: Tensor | None) -> Tensor:
    rows, features = _checked(x, layout)
    y = torch.empty((rows, features), dtype=x.dtype, device=x.device) if out is None else out
    if list(y.shape) != [rows, features] or y.dtype != x.dtype or not y.is_contiguous():
        raise ValueError(f"out is {y.dtype} {list(y.shape)}; expected contiguous {x.dtype} [{rows}, {features}]")
    if y.numel():
        block = min(_WIDEST_TILE, max(128, triton.next_power_of_2(features)))
        grid = (rows, triton.cdiv(features, block))
        _activation[grid](
            x,
            y,
            None,
            None,
            x.stride(0),
            features,
            float(alpha),
            float(limit),
            ACTIVATION=activation,
            GATED=layout is not None,
            INTERLEAVED=layout == "interleaved",
            QUANTIZES="",
            TO_FP8=False,
            BLOCK=block,
            num_warps=_warps(block),
        )
    return y


def _quantized(
    x: Tensor,
    quantization: Quantization,
    activation: str,
    layout: str | None,
    alpha: float,
    limit: float,
    keep: bool,
) -> tuple[Quantized, Tensor | None]:
    rows, features = _checked(x, layout)
    if features > _WIDEST_HELD:
        y = _whole(x, activation, layout, alpha, limit, None)
        return quantization.of(y), y if keep else None
    result = quantization.places((rows, features), x.device)
    kept = torch.empty((rows, features), dtype=x.dtype, device=x.device) if keep else None
    if rows:
        block, warps = row_launch(features)
        _activation[(rows, 1)](
            x,
            kept,
            as_bytes(result.values),
            result.scales,
            x.stride(0),
            features,
            float(alpha),
            float(limit),
            ACTIVATION=activation,
            GATED=layout is not None,
            INTERLEAVED=layout == "interleaved",
            QUANTIZES=quantization.kind,
            TO_FP8=quantization.to == torch.float8_e4m3fn,
            BLOCK=block,
            num_warps=warps,
        )
    return result, kept


def _warps(block: int) -> int:
    return max(1, block // 512)


def _check_gate(activation: str, layout: str) -> None:
    if activation not in GATED_ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; expected one of {', '.join(GATED_ACTIVATIONS)}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; expected one of {', '.join(LAYOUTS)}")


def _check_plain(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; expected one of {', '.join(ACTIVATIONS)}")


def _checked(x: Tensor, layout: str | None) -> tuple[int, int]:
    """Return the rows and features of the result."""
    if x.dim() != 2 or (x.shape[1] > 1 and x.stride(1) != 1):
        raise ValueError(f"rows {list(x.shape)} with strides {x.stride()}; expected [rows, width], each row contiguous")
    if layout is None:
        return x.shape[0], x.shape[1]
    if x.shape[1] % 2:
        raise ValueError(f"rows of {x.shape[1]} features are not gates and as many numbers to let through")
    return x.shape[0], x.shape[1] // 2


def variants() -> list[KernelVariant]:
    """Return what launches compile."""
    found = [
        _variant(dtype, activation, layout, 11008, None)
        for dtype in ("fp16", "bf16")
        for activation in ("silu", "gelu", "gelu_tanh", "swiglu_clamped")
        for layout in LAYOUTS
    ]
    found += [_variant("bf16", activation, "concat", 11008, None) for activation in ("relu", "relu2", "sigmoid")]
    found += [_variant("bf16", activation, None, 11008, None) for activation in ACTIVATIONS]
    found += [_variant("fp32", "silu", layout, 11008, None) for layout in LAYOUTS]
    found += [
        _variant("bf16", activation, layout, features, to)
        for activation, layout in (
            ("silu", "concat"),
            ("gelu_tanh", "concat"),
            ("swiglu_clamped", "interleaved"),
            ("gelu", None),
        )
        for features in (4096, 16384)
        for to in ("int8", "fp8")
    ]
    found += [
        _variant("bf16", "silu", "concat", 16384, to, kept=kept, kind=kind)
        for to in ("int8", "fp8")
        for kind, kept in (("rows", True), ("fixed", False), ("fixed", True))
    ]
    return found


def _variant(
    dtype: str,
    activation: str,
    layout: str | None,
    features: int,
    to: str | None,
    *,
    kept: bool = False,
    kind: str = "rows",
) -> KernelVariant:
    result: dict[str, str]
    absent: tuple[str, ...]
    if to is None:
        block, width = _WIDEST_TILE, ""
        warps = _warps(block)
        result, absent = {"y": f"*{dtype}"}, ("values", "scales")
    else:
        (block, warps), width = row_launch(features), f", {features} wide"
        result, absent = {"values": "*i8" if to == "int8" else "*u8", "scales": "*fp32"}, () if kept else ("y",)
        if kept:
            result["y"] = f"*{dtype}"
    also = f"{' by a fixed scale' if kind == 'fixed' else ''}{' and as it is' if kept else ''}"
    return KernelVariant(
        _activation,
        f"activation {activation}{f' {layout}' if layout else ''} {dtype}{f' to {to}{also}' if to else ''}{width}",
        {"x": f"*{dtype}", **result, "x_stride": "i32", "features": "i32", "alpha": "fp32", "limit": "fp32"},
        {
            **dict.fromkeys(absent),
            "ACTIVATION": activation,
            "GATED": layout is not None,
            "INTERLEAVED": layout == "interleaved",
            "QUANTIZES": kind if to else "",
            "TO_FP8": to == "fp8",
            "BLOCK": block,
        },
        num_warps=warps,
        aligned=("x", *result, "x_stride", "features"),
    )

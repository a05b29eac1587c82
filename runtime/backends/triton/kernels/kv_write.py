"""Writing keys and values of new tokens to pages, rounded and scaled as the pages keep them.

Bytes: each element is read once and written once, `T * G * (Dk + Dv) * (itemsize + page itemsize)`, and with rotary
embedding of queries in the same kernel `T * H * Dk * 2 * itemsize` more. In a decode step that is kilobytes, and the
start of a kernel, about 2 us, is all that it takes: hence one kernel for queries, keys and values. In prefill expect
70 to 80 % of bandwidth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferencex.formats.errors import BackendError
from inferencex.runtime.backends.triton.kernels.kv_pages import KVPages, e4m3_bits, int8_of
from inferencex.runtime.backends.triton.kernels.rope import (
    block_constants,
    check_rows,
    check_tables,
    heads_together,
    rotate_heads,
    rotated,
)
from inferencex.runtime.backends.triton.kernels.variant import KernelVariant

SMALLEST_LARGEST = tl.constexpr(2.0**-100)
"""The magnitude below which INT8 with a scale of its own keeps zeros, as `QuantizeRows` does."""


@triton.jit
def is_finite(x):  # type: ignore[no-untyped-def]
    """Tell of each row of `x [H, W]` whether all its numbers are finite."""
    return tl.max(tl.where(tl.abs(x) < float("inf"), 0, 1), 1) == 0


@triton.jit
def scales_of_largest(largest, finite):  # type: ignore[no-untyped-def]
    """Return scales `[H]` and what elements are multiplied with, given the largest magnitude of each head's elements.

    They are those of `QuantizeRows`: a row that is not all finite has the scale NaN, and one of nothing the scale 0.
    """
    some = (largest >= SMALLEST_LARGEST) & finite
    factors = tl.where(some, tl.div_rn(127.0, tl.where(some, largest, 1.0)), 0.0)
    scales = tl.where(some, tl.div_rn(largest, 127.0), tl.where(finite, 0.0, float("nan")))
    return scales, factors


@triton.jit
def keep(x, scales, pointers, mask, FORMAT: tl.constexpr, SCALING: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store `x [H, W]`, float32, at pointers into pages.

    `scales [H]` are divided by where they are those of heads, multiplied by where they are the factors of tokens.
    """
    if SCALING == "head":
        x = tl.div_rn(x, tl.broadcast_to(scales[:, None], x.shape))
    elif SCALING == "token":
        x = x * scales[:, None]
    if FORMAT == "int8":
        x = int8_of(x)
    elif FORMAT != "plain":
        x = e4m3_bits(x)
    tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def write_heads(  # type: ignore[no-untyped-def]
    x,
    pages,
    scales,
    slot,
    heads,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALING: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Write the `heads [H]` of the keys or values at `x`, those of one token, to `slot`."""
    columns = tl.arange(0, BLOCK_W)
    mask = (heads < KV_HEADS)[:, None] & (columns < WIDTH)[None, :]
    numbers = tl.load(x + heads[:, None] * WIDTH + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    places = slot * KV_HEADS + heads
    used = tl.max(numbers, 1)
    if SCALING == "head":
        used = tl.load(scales + heads, mask=heads < KV_HEADS, other=1.0)
    if SCALING == "token":
        token_scales, used = scales_of_largest(tl.max(tl.abs(numbers), 1), is_finite(numbers))
        tl.store(scales + places, token_scales, mask=heads < KV_HEADS)
    keep(numbers, used, pages + places[:, None] * WIDTH + columns[None, :], mask, FORMAT, SCALING)


@triton.jit
def write_kv_kernel(  # type: ignore[no-untyped-def]
    k,
    v,
    keys,
    values,
    key_scales,
    value_scales,
    slots,
    k_stride,
    v_stride,
    KV_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALING: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Write `BLOCK_H` heads of a token; grid: tokens, blocks of heads. Tokens with a negative slot are left out."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    write_heads(k + row * k_stride, keys, key_scales, slot, heads, KV_HEADS, DK, FORMAT, SCALING, BLOCK_DK)
    write_heads(v + row * v_stride, values, value_scales, slot, heads, KV_HEADS, DV, FORMAT, SCALING, BLOCK_DV)


@triton.jit
def rope_write_kernel(  # type: ignore[no-untyped-def]
    q,
    y,
    k,
    v,
    cos,
    sin,
    positions,
    slots,
    keys,
    values,
    key_scales,
    value_scales,
    q_stride,
    y_stride,
    k_stride,
    v_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    COPIED: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALING: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Rotate heads of a token's query, or rotate and write heads of its key and write those of its value.

    Grid: tokens, blocks of `BLOCK_H` query heads and, after them, of KV heads. Tokens with a negative slot are not
    written, their queries are rotated. With scales for tokens the whole rotated key decides on its scale, so a program
    has all of its heads' elements at once.
    """
    Q_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    row = tl.program_id(0).to(tl.int64)
    position = row
    if positions is not None:
        position = tl.load(positions + row).to(tl.int64)
    if tl.program_id(1) < Q_BLOCKS:
        heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        rotate_heads(
            q + row * q_stride, y + row * y_stride, cos, sin, position, heads,
            HEADS, DK, HALF, INTERLEAVED, COPIED, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        slot = tl.load(slots + row)
        if slot >= 0:
            heads = (tl.program_id(1) - Q_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
            x = k + row * k_stride
            a, b, first, second, mask = rotated(
                x, cos, sin, position, heads, KV_HEADS, DK, HALF, INTERLEAVED, BLOCK_HALF
            )
            # A page keeps what a key of the activations' type would be.
            a = a.to(k.dtype.element_ty).to(tl.float32)
            b = b.to(k.dtype.element_ty).to(tl.float32)
            rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
            rest_mask = (heads < KV_HEADS)[:, None] & (rest < DK)
            if 2 * HALF < DK:
                c = tl.load(x + heads[:, None] * DK + rest, mask=rest_mask, other=0.0).to(tl.float32)
            places = slot * KV_HEADS + heads
            used = tl.max(a, 1)
            if SCALING == "head":
                used = tl.load(key_scales + heads, mask=heads < KV_HEADS, other=1.0)
            if SCALING == "token":
                largest = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1))
                finite = is_finite(a) & is_finite(b)
                if 2 * HALF < DK:
                    largest = tl.maximum(largest, tl.max(tl.abs(c), 1))
                    finite = finite & is_finite(c)
                scales, used = scales_of_largest(largest, finite)
                tl.store(key_scales + places, scales, mask=heads < KV_HEADS)
            rows = keys + places[:, None] * DK
            keep(a, used, rows + first, mask, FORMAT, SCALING)
            keep(b, used, rows + second, mask, FORMAT, SCALING)
            if 2 * HALF < DK:
                keep(c, used, rows + rest, rest_mask, FORMAT, SCALING)
            write_heads(v + row * v_stride, values, value_scales, slot, heads, KV_HEADS, DV, FORMAT, SCALING, BLOCK_DV)


def check_slots(slots: Tensor, rows: int) -> None:
    """Raise BackendError unless `slots` is int64 `[rows]`."""
    if slots.shape != (rows,) or slots.dtype != torch.int64 or not slots.is_contiguous():
        raise BackendError(f"slots are {slots.dtype} {list(slots.shape)}, expected int64 {[rows]}")


def write_kv(k: Tensor, v: Tensor, pages: KVPages, slots: Tensor) -> None:
    """Write keys `k [T, G * Dk]` and values `v [T, G * Dv]`, of any float type, to the flat `slots`, int64 `[T]`.

    Rows may be apart from each other. Tokens whose slot is negative are left out. Raises BackendError for shapes that
    contradict each other.
    """
    rows, heads = slots.shape[0], pages.num_kv_heads
    check_slots(slots, rows)
    check_rows("k", k, rows, heads * pages.key_width)
    check_rows("v", v, rows, heads * pages.value_width)
    if not rows:
        return
    keys, values = pages.storage()
    together = heads_together(heads, max(pages.key_width, pages.value_width))
    write_kv_kernel[(rows, triton.cdiv(heads, together))](
        k,
        v,
        keys,
        values,
        pages.key_scales,
        pages.value_scales,
        slots,
        k.stride(0),
        v.stride(0),
        KV_HEADS=heads,
        DK=pages.key_width,
        DV=pages.value_width,
        FORMAT=pages.format,
        SCALING=pages.scaling,
        BLOCK_H=together,
        BLOCK_DK=triton.next_power_of_2(pages.key_width),
        BLOCK_DV=triton.next_power_of_2(pages.value_width),
        num_warps=4,
    )


def rope_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: KVPages,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    *,
    num_heads: int,
    num_kv_heads: int,
    interleaved: bool,
    width: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Rotate queries `q [T, H * Dk]`, in place or to `out`, and write rotated keys and values to pages: one kernel.

    What goes to the pages is what `write_kv` makes of `rope(k)` and `v`; tokens whose slot is negative are not written.
    Returns the rotated queries. Raises BackendError for shapes that contradict each other.
    """
    if num_kv_heads != pages.num_kv_heads:
        raise BackendError(f"keys of {num_kv_heads} heads are to be written to pages of {pages.num_kv_heads}")
    width = width or pages.key_width
    rows, kv_heads, head = slots.shape[0], pages.num_kv_heads, pages.key_width
    out = q if out is None else out
    check_slots(slots, rows)
    check_rows("q", q, rows, num_heads * head)
    check_rows("the output of a rotation", out, rows, num_heads * head)
    check_rows("k", k, rows, kv_heads * head)
    check_rows("v", v, rows, kv_heads * pages.value_width)
    check_tables(cos, sin, positions, rows, width, head)
    if rows:
        keys, values = pages.storage()
        blocks = block_constants(max(num_heads, kv_heads), max(head, pages.value_width), width)
        blocks["BLOCK_REST"] = triton.next_power_of_2(max(head - width, 1))
        tiles = triton.cdiv(num_heads, blocks["BLOCK_H"]) + triton.cdiv(kv_heads, blocks["BLOCK_H"])
        rope_write_kernel[(rows, tiles)](
            q,
            out,
            k,
            v,
            cos,
            sin,
            positions,
            slots,
            keys,
            values,
            pages.key_scales,
            pages.value_scales,
            q.stride(0),
            out.stride(0),
            k.stride(0),
            v.stride(0),
            HEADS=num_heads,
            KV_HEADS=kv_heads,
            DK=head,
            DV=pages.value_width,
            HALF=width // 2,
            INTERLEAVED=interleaved,
            COPIED=out.data_ptr() != q.data_ptr(),
            FORMAT=pages.format,
            SCALING=pages.scaling,
            **blocks,
            BLOCK_DV=triton.next_power_of_2(pages.value_width),
            num_warps=4,
        )
    return out


PAGE_KINDS = ((None, "plain", "none"), ("i8", "int8", "head"), ("i8", "int8", "token"), ("u8", "fp8_bits", "head"))
"""How pages keep elements: Triton's type (None for that of the activations), format and scaling."""


def variants() -> list[KernelVariant]:
    """Return both kernels for every way that pages keep elements, and for latent heads."""
    found = []
    for page, page_format, scaling in PAGE_KINDS:
        for element, heads, kv_heads, key_width, value_width, width in (
            ("bf16", 32, 8, 128, 128, 128),
            ("fp16", 32, 8, 128, 128, 64),
            ("bf16", 16, 1, 576, 512, 64),
        ):
            pages = f"*{page or element}"
            scales = ("key_scales", "value_scales")
            signature = {name: f"*{element}" for name in ("k", "v")} | {"keys": pages, "values": pages}
            signature |= {"slots": "*i64", "k_stride": "i32", "v_stride": "i32"}
            signature |= dict.fromkeys(scales, "*fp32") if scaling != "none" else {}
            constants: dict[str, object] = {
                **(dict.fromkeys(scales) if scaling == "none" else {}),
                "KV_HEADS": kv_heads,
                "DK": key_width,
                "DV": value_width,
                "FORMAT": page_format,
                "SCALING": scaling,
                "BLOCK_DV": triton.next_power_of_2(value_width),
            }
            kept = f"{element} to {page or element}, scales: {scaling}, {kv_heads} x {key_width}/{value_width}"
            own: dict[str, object] = {
                "BLOCK_H": heads_together(kv_heads, key_width),
                "BLOCK_DK": triton.next_power_of_2(key_width),
            }
            found.append(
                KernelVariant(write_kv_kernel, f"write_kv {kept}", signature, constants | own, aligned=tuple(signature))
            )
            turned = signature | {"q": f"*{element}", "y": f"*{element}", "cos": "*fp32", "sin": "*fp32"}
            turned |= {"positions": "*i64", "q_stride": "i32", "y_stride": "i32"}
            own = {
                "HEADS": heads,
                "HALF": width // 2,
                "INTERLEAVED": width < key_width,
                "COPIED": True,
                **block_constants(heads, key_width, width),
            }
            found.append(
                KernelVariant(rope_write_kernel, f"rope_write {kept}", turned, constants | own, aligned=tuple(turned))
            )
    return found

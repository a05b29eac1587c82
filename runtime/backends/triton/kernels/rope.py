"""Rotary position embedding (Su et al. 2021) of queries or keys; `kv_write` has it together with the write of keys.

Of each head the first `width` elements are rotated in pairs: elements `i` and `i + width / 2`, or with `interleaved`
elements `2i` and `2i + 1`, by the angle whose cosine and sine the tables `[P, width / 2]` have in column `i` and the
row of the token's position. What is past `width` stays as it is. Arithmetic is float32.

Bytes: `2 * T * heads * D * itemsize`, and the tables' rows, read once per token and block of heads, mostly from L2.
In prefill expect 70 to 80 % of bandwidth; a decode step takes the start of a kernel, about 2 us.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferencex.formats.errors import BackendError
from inferencex.runtime.backends.triton.kernels.variant import KernelVariant


@triton.jit
def rotated(  # type: ignore[no-untyped-def]
    x,
    cos,
    sin,
    position,
    heads,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Return the rotated pairs of the `heads [H]` at `x`, two of [H, BLOCK_HALF], with where they are.

    That is their columns, two of [1, BLOCK_HALF], and which of them there are, [H, BLOCK_HALF].
    """
    pairs = tl.arange(0, BLOCK_HALF)
    if INTERLEAVED:
        first, second = (2 * pairs)[None, :], (2 * pairs + 1)[None, :]
    else:
        first, second = pairs[None, :], (pairs + HALF)[None, :]
    mask = (heads < HEADS)[:, None] & (pairs < HALF)[None, :]
    rows = x + heads[:, None] * D
    a = tl.load(rows + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(rows + second, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + position * HALF + pairs, mask=pairs < HALF, other=0.0)[None, :]
    s = tl.load(sin + position * HALF + pairs, mask=pairs < HALF, other=0.0)[None, :]
    return a * c - b * s, a * s + b * c, first, second, mask


@triton.jit
def rotate_heads(  # type: ignore[no-untyped-def]
    x,
    y,
    cos,
    sin,
    position,
    heads,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    COPIED: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Rotate the `heads [H]` of the token at `x` and store them at `y`; with `COPIED` also what is not rotated."""
    a, b, first, second, mask = rotated(x, cos, sin, position, heads, HEADS, D, HALF, INTERLEAVED, BLOCK_HALF)
    rows = y + heads[:, None] * D
    tl.store(rows + first, a.to(y.dtype.element_ty), mask=mask)
    tl.store(rows + second, b.to(y.dtype.element_ty), mask=mask)
    if COPIED and 2 * HALF < D:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        mask = (heads < HEADS)[:, None] & (rest < D)
        tl.store(rows + rest, tl.load(x + heads[:, None] * D + rest, mask=mask), mask=mask)


@triton.jit
def rope_kernel(  # type: ignore[no-untyped-def]
    x,
    y,
    cos,
    sin,
    positions,
    x_stride,
    y_stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    COPIED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Rotate `BLOCK_H` heads of a token; grid: tokens, blocks of heads.

    Without `positions` row `t` of the tables is that of token `t`.
    """
    row = tl.program_id(0).to(tl.int64)
    position = row
    if positions is not None:
        position = tl.load(positions + row).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    rotate_heads(
        x + row * x_stride, y + row * y_stride, cos, sin, position, heads,
        HEADS, D, HALF, INTERLEAVED, COPIED, BLOCK_HALF, BLOCK_REST,
    )  # fmt: skip


def heads_together(heads: int, width: int) -> int:
    """Return how many heads of a token a program takes: a power of two, so many that it has about 1024 elements."""
    return int(max(1, min(triton.next_power_of_2(heads), 1024 // triton.next_power_of_2(width))))


def check_rows(name: str, x: Tensor, rows: int, columns: int) -> None:
    """Raise BackendError unless `x` is `[rows, columns]` with adjacent columns."""
    if x.shape != (rows, columns) or x.stride(1) != 1:
        raise BackendError(f"{name} is {list(x.shape)}, expected {[rows, columns]} with adjacent columns")


def check_tables(cos: Tensor, sin: Tensor, positions: Tensor | None, rows: int, width: int, head: int) -> None:
    """Raise BackendError unless the tables fit heads of `head` elements, of which `width` are rotated."""
    if width % 2 or not 0 < width <= head:
        raise BackendError(f"{width} elements of a head of {head} cannot be rotated in pairs")
    for name, table in (("cosines", cos), ("sines", sin)):
        if table.dim() != 2 or table.shape[1] != width // 2 or table.dtype != torch.float32:
            raise BackendError(
                f"the {name} of a rotation are {table.dtype} {list(table.shape)}, expected float32 [_, {width // 2}]"
            )
        if not table.is_contiguous():
            raise BackendError(f"the {name} of a rotation are not contiguous")
    if positions is None:
        if cos.shape[0] < rows or sin.shape[0] < rows:
            raise BackendError(f"tables of {cos.shape[0]} and {sin.shape[0]} rows rotate {rows} tokens")
    elif positions.shape != (rows,) or positions.dtype not in (torch.int32, torch.int64):
        raise BackendError(f"positions are {positions.dtype} {list(positions.shape)}, expected integers {[rows]}")


def block_constants(heads: int, head: int, width: int) -> dict[str, int]:
    """Return the sizes of the blocks of a rotation."""
    return {
        "BLOCK_H": heads_together(heads, head),
        "BLOCK_HALF": triton.next_power_of_2(width // 2),
        "BLOCK_REST": triton.next_power_of_2(max(head - width, 1)),
    }


def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    heads: int,
    *,
    interleaved: bool,
    width: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Rotate `x [T, heads * D]`, of any float type, and return what becomes of it, in `out` if given (`x` is allowed).

    `cos` and `sin` are float32 `[P, width / 2]`, `positions` integers `[T]` below P, or None for row `t` of the tables
    to be that of token `t`; `width` 0 is all of a head. Raises BackendError for shapes that contradict each other.
    """
    rows, columns = x.shape
    if columns % heads:
        raise BackendError(f"{columns} columns are no {heads} heads")
    head = columns // heads
    width = width or head
    check_rows("x", x, rows, columns)
    check_tables(cos, sin, positions, rows, width, head)
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device) if out is None else out
    check_rows("the output of a rotation", out, rows, columns)
    if rows:
        blocks = block_constants(heads, head, width)
        rope_kernel[(rows, triton.cdiv(heads, blocks["BLOCK_H"]))](
            x,
            out,
            cos,
            sin,
            positions,
            x.stride(0),
            out.stride(0),
            HEADS=heads,
            D=head,
            HALF=width // 2,
            INTERLEAVED=interleaved,
            COPIED=out.data_ptr() != x.data_ptr(),
            **blocks,
            num_warps=4,
        )
    return out


def variants() -> list[KernelVariant]:
    """Return the kernel for both layouts of pairs, all and part of a head, and tables by token."""
    found = []
    for element in ("bf16", "fp16"):
        for heads, head, width, interleaved in ((32, 128, 128, False), (32, 128, 64, True), (32, 80, 32, False)):
            for by_token in (False, True):
                positions = {} if by_token else {"positions": "*i64"}
                signature = {
                    "x": f"*{element}",
                    "y": f"*{element}",
                    "cos": "*fp32",
                    "sin": "*fp32",
                    **positions,
                    "x_stride": "i32",
                    "y_stride": "i32",
                }
                constants: dict[str, object] = {
                    **({"positions": None} if by_token else {}),
                    "HEADS": heads,
                    "D": head,
                    "HALF": width // 2,
                    "INTERLEAVED": interleaved,
                    "COPIED": True,
                    **block_constants(heads, head, width),
                }
                layout = "interleaved" if interleaved else "halves"
                name = f"rope {element}, {width} of {head} in {layout}{', a row a token' if by_token else ''}"
                found.append(KernelVariant(rope_kernel, name, signature, constants, aligned=tuple(signature)))
    return found

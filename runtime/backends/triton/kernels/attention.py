"""Attention of a ragged step over pages: prefill in tiles of queries, decode in splits of keys.

Two kernels, for two shapes of work: sequences with several new tokens are bound by arithmetic and read each key for
many queries; those with one are bound by memory, and need their keys split to occupy a GPU.

A row's result depends on its own sequence alone: on nothing else in the batch, nor on the bucket of a recorded graph.
Cutting a prompt in other chunks changes nothing either, but for a chunk of a single token, which goes through the
kernels of decode and differs by rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inferencex.formats.errors import BackendError
from inferencex.runtime.backends.triton.kernels.attention_step import AttentionLayer as AttentionLayer
from inferencex.runtime.backends.triton.kernels.attention_step import AttentionStep as AttentionStep
from inferencex.runtime.backends.triton.kernels.attention_step import HeadShape
from inferencex.runtime.backends.triton.kernels.decode_attention import decode_attention
from inferencex.runtime.backends.triton.kernels.kv_pages import KVPages
from inferencex.runtime.backends.triton.kernels.prefill_attention import (
    configuration_of,
    prefill_attention,
    rows_of_tile,
)


def rows_per_tile(device: torch.device, num_heads: int, pages: KVPages, dtype: torch.dtype) -> int:
    """Return the `tile_rows` that suit a layer."""
    shape = HeadShape.of(num_heads, pages, dtype)
    return rows_of_tile(shape, configuration_of(shape, device))


def attention(
    q: Tensor,
    pages: KVPages,
    step: AttentionStep,
    *,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend `q [T, H * Dk]` over the pages of a layer, which hold the new tokens too: `[T, H * Dv]` of q's type.

    Rows of `q`, and of `out`, may be apart from each other. `sinks [H]` and `slopes [H]` are float tensors. Products
    are of q's type with float32 sums. Nothing waits for the device. Raises BackendError for shapes that contradict
    each other.
    """
    key_width, value_width = pages.key_width, pages.value_width
    if num_kv_heads != pages.num_kv_heads or num_heads % num_kv_heads:
        raise BackendError(f"attention of {num_heads} over {num_kv_heads} heads on pages of {pages.num_kv_heads}")
    if q.shape != (step.slots.shape[0], num_heads * key_width) or q.stride(1) != 1:
        expected = [step.slots.shape[0], num_heads * key_width]
        raise BackendError(f"queries are {list(q.shape)}, expected {expected} with adjacent columns")
    for name, tensor in (("sinks", sinks), ("slopes", slopes)):
        if tensor is not None and (tensor.shape != (num_heads,) or not tensor.is_contiguous()):
            raise BackendError(f"{name} are {list(tensor.shape)}, expected {[num_heads]}")
    if out is None:
        out = torch.empty(q.shape[0], num_heads * value_width, dtype=q.dtype, device=q.device)
    elif out.shape != (q.shape[0], num_heads * value_width) or out.stride(1) != 1:
        raise BackendError(f"attention's output is {list(out.shape)}, expected {[q.shape[0], num_heads * value_width]}")
    layer = AttentionLayer(num_heads, scale, window, chunk, softcap, sinks, slopes)
    if step.tiles.shape[0]:
        prefill_attention(q, pages, step, layer, out)
    if step.decode_sequences.shape[0]:
        decode_attention(q, pages, step, layer, out)
    return out

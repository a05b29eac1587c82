"""Measuring attention: steps of random keys and values, such as those of decoding and of reading a prompt."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from inferencex.formats.kv_cache import KVScales
from inferencex.runtime.backends.triton.attention_tiles import plan_tiles
from inferencex.runtime.backends.triton.kernels import decode_tiles
from inferencex.runtime.backends.triton.kernels import prefill_attention as prefill
from inferencex.runtime.backends.triton.kernels.attention_step import (
    AttentionLayer,
    AttentionStep,
    HeadShape,
    family_of,
)
from inferencex.runtime.backends.triton.kernels.decode_attention import decode_attention
from inferencex.runtime.backends.triton.kernels.kv_pages import KVPages
from inferencex.runtime.backends.triton.tuning import Config, Tuner

DECODED_SEQUENCES, DECODED_CONTEXT, PROMPT = 8, 4096, 4096
"""The steps that are measured: of so many sequences, and of one prompt; shorter where models take no longer ones."""


def tune_attention(
    tuner: Tuner,
    shape: HeadShape,
    layer: AttentionLayer,
    device: torch.device,
    *,
    block_size: int = 16,
    longest: int = DECODED_CONTEXT,
) -> None:
    """Measure decoding and reading a prompt on a device.

    layer:   what its heads do besides; what is chosen is used for all layers of the shape
    longest: tokens that a sequence may have
    """
    family = family_of(device)
    context = min(longest, DECODED_CONTEXT)
    contexts = [context] * DECODED_SEQUENCES
    pages = _pages(shape, DECODED_SEQUENCES * -(-context // block_size), block_size, device)
    step = _step([1] * DECODED_SEQUENCES, contexts, block_size, 1, device)
    q, out = _rows(shape, DECODED_SEQUENCES, device)
    tuner.tune(
        decode_tiles.KERNEL,
        shape.name,
        decode_tiles.decode_options(shape, family),
        lambda config: decode_attention(q, pages, step, layer, out, config),
    )
    length = min(longest, PROMPT)
    options = prefill.prefill_options(shape, family)
    planned = {
        rows: _step([length], [length], block_size, rows, device)
        for rows in {prefill.rows_of_tile(shape, o) for o in options}
    }
    prompt_pages = _pages(shape, -(-length // block_size), block_size, device)
    prompt_q, prompt_out = _rows(shape, length, device)

    def read(config: Config) -> None:
        prompt = planned[prefill.rows_of_tile(shape, config)]
        prefill.prefill_attention(prompt_q, prompt_pages, prompt, layer, prompt_out, config)

    tuner.tune(prefill.KERNEL, shape.name, options, read)


def _rows(shape: HeadShape, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random queries, and where results go."""
    q = torch.randn(tokens, shape.num_heads * shape.key_width, device=device).to(shape.dtype)
    return q, torch.empty(tokens, shape.num_heads * shape.value_width, dtype=shape.dtype, device=device)


def _step(
    counts: list[int], contexts: list[int], block_size: int, tile_rows: int, device: torch.device
) -> AttentionStep:
    """Return a step of sequences whose blocks lie in an order that means nothing."""
    blocks = -(-max(contexts) // block_size)
    order = np.random.default_rng(0).permutation(len(counts) * blocks).astype(np.int32)
    offsets, lengths = np.cumsum([0, *counts]).astype(np.int32), np.array(contexts, np.int32)
    planned = plan_tiles(offsets, lengths, tile_rows)

    def put(array: np.ndarray[tuple[int, ...], np.dtype[np.integer]]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return AttentionStep(
        slots=put(np.zeros(offsets[-1], np.int64)),
        sequence_offsets=put(offsets),
        context_lengths=put(lengths),
        block_tables=put(order.reshape(len(counts), blocks)),
        tiles=put(planned.tiles),
        tile_rows=tile_rows,
        decode_sequences=put(planned.decode_sequences),
        decode_groups=planned.decode_groups,
        keys_before=put(planned.keys_before),
        longest_context=max(contexts),
    )


def _pages(shape: HeadShape, blocks: int, block_size: int, device: torch.device) -> KVPages:
    """Return pages of random numbers."""
    scales = None
    if shape.scaling == "head":
        numbers = (0.01,) * shape.num_kv_heads
        scales = KVScales("int8" if shape.page_dtype == torch.int8 else "fp8", numbers, numbers)
    pages = KVPages.allocate(
        blocks,
        block_size,
        shape.num_kv_heads,
        shape.key_width,
        shape.value_width,
        shape.page_dtype,
        device,
        scales,
    )
    for part in (pages.keys, pages.values):
        for block in part:  # one at a time: random numbers are float32
            block.copy_(torch.randn(block.shape, device=device).clamp(-100, 100).to(shape.page_dtype))
    if shape.scaling == "token":
        for scale in (pages.key_scales, pages.value_scales):
            assert scale is not None
            scale.fill_(0.01)
    return pages

"""Sequences with their keys and values in pages, in an order of blocks that means nothing, and what attention gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inferencex.formats.kv_cache import KVScales
from inferencex.runtime.backends.reference.attention import attend
from inferencex.runtime.backends.triton.attention_tiles import plan_tiles
from inferencex.runtime.backends.triton.kernels.attention import AttentionStep, attention
from inferencex.runtime.backends.triton.kernels.kv_pages import KVPages
from inferencex.runtime.backends.triton.kernels.kv_write import write_kv


@dataclass(frozen=True)
class Layer:
    """A layer's heads, how it is kept, and the options of its attention."""

    heads: int = 4
    kv_heads: int = 2
    key_width: int = 16
    value_width: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    pages: torch.dtype | None = None  # as `dtype`
    scaled_by_head: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def with_options(self, **options: Any) -> Layer:
        """Return the layer with other options of attention."""
        return replace(self, options=options)


@dataclass(frozen=True)
class Step:
    """A step of some sequences, and what attention is to give for it."""

    layer: Layer
    q: Tensor
    pages: KVPages
    inputs: AttentionStep
    expected: Tensor

    def run(self, **changes: Any) -> Tensor:
        """Attend, with a step that is changed in some fields."""
        return attention(
            self.q,
            self.pages,
            replace(self.inputs, **changes),
            num_heads=self.layer.heads,
            num_kv_heads=self.layer.kv_heads,
            scale=_scale(self.layer),
            **self.layer.options,
        )


def _scale(layer: Layer) -> float:
    return float(layer.key_width**-0.5)


def filled_pages(layer: Layer, num_blocks: int, device: str) -> KVPages:
    """Return pages in which nothing was written, and which spoil whatever reads them."""
    dtype = layer.pages or layer.dtype
    scales = None
    if layer.scaled_by_head:
        numbers = tuple(0.02 + 0.005 * head for head in range(layer.kv_heads))
        scales = KVScales("int8" if dtype == torch.int8 else "fp8", numbers, numbers[::-1])
    pages = KVPages.allocate(
        num_blocks, layer.block_size, layer.kv_heads, layer.key_width, layer.value_width, dtype, device, scales
    )
    for tensor in pages.storage():
        tensor.fill_(127 if dtype.itemsize == 1 else float("nan"))
    if pages.scaling == "token":
        for scale in (pages.key_scales, pages.value_scales):
            assert scale is not None
            scale.fill_(float("nan"))
    return pages


def read_back(pages: KVPages, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values `[L, G, D]` of slots as float32."""
    found = []
    for elements, scales in ((pages.keys, pages.key_scales), (pages.values, pages.value_scales)):
        numbers = elements.flatten(0, 1)[slots].to(torch.float32)
        if scales is not None:
            by_token = scales.dim() == 3
            numbers = numbers * (scales.flatten(0, 1)[slots] if by_token else scales[None])[..., None]
        found.append(numbers)
    return found[0], found[1]


def block_tables(contexts: Sequence[int], block_size: int, seed: int = 0) -> tuple[np.ndarray, int]:
    """Return tables of shuffled blocks, int32 [S, B] padded with -1, and how many blocks there are."""
    counts = [-(-context // block_size) for context in contexts]
    free = list(np.random.default_rng(seed).permutation(sum(counts) + 2))
    tables = np.full((len(contexts), max([*counts, 1])), -1, dtype=np.int32)
    for sequence, count in enumerate(counts):
        tables[sequence, :count] = [free.pop() for _ in range(count)]
    return tables, sum(counts) + 2


def slots_of(table: np.ndarray, context: int, block_size: int) -> Tensor:
    """Return the flat slots of a sequence's tokens."""
    at = np.arange(context)
    return torch.from_numpy(table[at // block_size].astype(np.int64) * block_size + at % block_size)


def make_step(
    layer: Layer, sequences: Sequence[tuple[int, int]], device: str, tile_rows: int = 8, seed: int = 0
) -> Step:
    """Return a step of sequences of so many tokens, and new ones; a sequence's numbers depend on it and `seed`."""
    contexts = [context for context, _ in sequences]
    tables, num_blocks = block_tables(contexts, layer.block_size, seed)
    offsets = np.cumsum([0, *(new for _, new in sequences)], dtype=np.int32)
    pages = filled_pages(layer, num_blocks, device)
    queries, slots, expected = [], [], []
    for sequence, (context, new) in enumerate(sequences):
        random = torch.Generator().manual_seed(seed * 1000 + context)
        # All queries that a sequence ever had, so that its last ones do not depend on how many are new.
        q = torch.randn(context, layer.heads * layer.key_width, generator=random).to(layer.dtype)[context - new :]
        k = torch.randn(context, layer.kv_heads * layer.key_width, generator=random).to(layer.dtype)
        v = torch.randn(context, layer.kv_heads * layer.value_width, generator=random).to(layer.dtype)
        own = slots_of(tables[sequence], context, layer.block_size).to(device)
        write_kv(k.to(device), v.to(device), pages, own)
        queries.append(q)
        slots.append(own[context - new :])
        if not new:
            continue
        keys, values = (x.cpu() for x in read_back(pages, own))
        options = {"window": 0, "chunk": 0, "softcap": 0.0, "sinks": None, "slopes": None} | layer.options
        options |= {n: options[n].cpu() for n in ("sinks", "slopes") if options[n] is not None}
        attended = attend(
            q.float().unflatten(1, (layer.heads, -1)),
            keys,
            values,
            torch.arange(context - new, context),
            scale=_scale(layer),
            **options,
        )
        expected.append(attended.flatten(1))
    tiles = plan_tiles(offsets, np.array(contexts, np.int32), tile_rows)
    inputs = AttentionStep(
        slots=torch.cat(slots),
        sequence_offsets=torch.from_numpy(offsets).to(device),
        context_lengths=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=torch.from_numpy(tables).to(device),
        tiles=torch.from_numpy(tiles.tiles).to(device),
        tile_rows=tile_rows,
        decode_sequences=torch.from_numpy(tiles.decode_sequences).to(device),
        decode_groups=tiles.decode_groups,
        keys_before=torch.from_numpy(tiles.keys_before).to(device),
        longest_context=max(contexts),
    )
    return Step(layer, torch.cat(queries).to(device), pages, inputs, torch.cat(expected))

"""Attention of a ragged batch over paged keys and values, one sequence at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from inferencex.formats.kv_cache import KV_LARGEST, KVFormat, KVScales
from inferencex.runtime.backends.base import StepBatch


@dataclass
class PagedKV:
    """Keys and values of one layer: `keys [blocks, block_size, G, Dk]`, `values [blocks, block_size, G, Dv]`."""

    keys: Tensor
    values: Tensor

    @classmethod
    def allocate(cls, num_blocks: int, block_size: int, heads: int, key_dim: int, value_dim: int) -> PagedKV:
        """Reserve the pages; what they hold is undefined, and takes no memory, until written."""
        return cls(
            torch.empty(num_blocks, block_size, heads, key_dim), torch.empty(num_blocks, block_size, heads, value_dim)
        )

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store `keys [T, G, Dk]` and `values [T, G, Dv]` in the flat `slots [T]`."""
        self.keys.flatten(0, 1)[slots] = keys
        self.values.flatten(0, 1)[slots] = values

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the flat `slots [L]`."""
        return self.keys.flatten(0, 1)[slots], self.values.flatten(0, 1)[slots]


def keep_in_8_bits(x: Tensor, scales: Sequence[float], kind: KVFormat) -> Tensor:
    """Return keys or values `[T, G, D]` as they are read back once kept with a scale for each head, float32."""
    largest = KV_LARGEST[kind]
    by_head = torch.tensor(scales, dtype=torch.float32)[:, None]
    scaled = (x / by_head).clamp(-largest, largest)
    return (scaled.round() if kind == "int8" else scaled.to(torch.float8_e4m3fn).to(torch.float32)) * by_head


def slots_of(batch: StepBatch, sequence: int, block_size: int) -> Tensor:
    """Return the flat slots of a sequence's positions `0 .. context_length - 1`."""
    positions = torch.arange(int(batch.context_lengths[sequence]))
    blocks = torch.from_numpy(batch.block_tables[sequence]).to(torch.int64)
    return blocks[positions // block_size] * block_size + positions % block_size


@dataclass(frozen=True)
class _Chunk:
    """The new tokens of one sequence: rows `start:stop` of the step, their `positions`, and the sequence's slots."""

    start: int
    stop: int
    positions: Tensor
    slots: Tensor


def visible_keys(positions: Tensor, length: int, window: int, chunk: int) -> Tensor:
    """Tell which keys at positions `0 .. length - 1` the queries at `positions [T]` see: bool `[T, length]`."""
    at, query = torch.arange(length)[None, :], positions[:, None]
    visible = at <= query
    if window:
        visible = visible & (query - at < window)
    if chunk:
        visible = visible & (query // chunk == at // chunk)
    return visible


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    *,
    sinks: Tensor | None,
    slopes: Tensor | None,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
) -> Tensor:
    """Attend `q [T, H, Dk]` at `positions [T]` over `keys [L, G, Dk]`, `values [L, G, Dv]` at positions 0..L-1."""
    group = q.shape[1] // keys.shape[1]
    keys = keys.repeat_interleave(group, 1)
    values = values.repeat_interleave(group, 1)
    scores = torch.einsum("thd,lhd->htl", q, keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores + slopes[:, None, None] * (torch.arange(keys.shape[0])[None, :] - positions[:, None])
    scores = scores.masked_fill(~visible_keys(positions, keys.shape[0], window, chunk), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, q.shape[0], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[0]]
    return torch.einsum("htl,lhd->thd", weights, values)


class AttentionState:
    """The pools of all layers, and the handler that serves `Attention` nodes from them during a step.

    `scales` has those of layers that are kept in 8 bits; what such a layer reads back is stored as float32.
    """

    def __init__(self, num_blocks: int, block_size: int, scales: Mapping[int, KVScales] | None = None) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._scales = scales or {}
        self.layers: dict[int, PagedKV] = {}
        self._chunks: list[_Chunk] = []

    def begin(self, batch: StepBatch) -> None:
        """Take in the step that the following calls of `run` belong to; what all layers share is computed here."""
        positions = torch.from_numpy(batch.positions).to(torch.int64)
        self._chunks = [
            _Chunk(start, stop, positions[start:stop], slots_of(batch, sequence, self.block_size))
            for sequence, (start, stop) in enumerate(pairwise(batch.sequence_offsets.tolist()))
        ]

    def run(self, inputs: list[Tensor | None], attributes: dict[str, Any]) -> Tensor:
        """Execute one `Attention` node: `q [T, H * Dk]`, `k [T, G * Dk]`, `v [T, G * Dv]` -> `[T, H * Dv]`."""
        q, k, v = inputs[:3]
        assert q is not None and k is not None and v is not None
        sinks = inputs[3] if len(inputs) > 3 else None
        slopes = inputs[4] if len(inputs) > 4 else None
        heads, kv_heads, layer = attributes["num_heads"], attributes["num_kv_heads"], attributes["layer"]
        q = torch.unflatten(q, -1, (heads, -1))
        k, v = torch.unflatten(k, -1, (kv_heads, -1)), torch.unflatten(v, -1, (kv_heads, -1))
        if layer not in self.layers:
            self.layers[layer] = PagedKV.allocate(self.num_blocks, self.block_size, kv_heads, k.shape[-1], v.shape[-1])
        pages, scales = self.layers[layer], self._scales.get(layer)
        if scales is not None:
            k = keep_in_8_bits(k, scales.keys, scales.format)
            v = keep_in_8_bits(v, scales.values, scales.format)
        parts = []
        for chunk in self._chunks:
            start, stop, slots = chunk.start, chunk.stop, chunk.slots
            if attributes.get("writes", 1):
                pages.write(slots[len(slots) - (stop - start) :], k[start:stop], v[start:stop])
            keys, values = pages.read(slots)
            parts.append(
                attend(
                    q[start:stop],
                    keys,
                    values,
                    chunk.positions,
                    sinks=sinks,
                    slopes=slopes,
                    scale=attributes["scale"],
                    window=attributes.get("window", 0),
                    chunk=attributes.get("chunk", 0),
                    softcap=attributes.get("softcap", 0.0),
                )
            )
        return torch.cat(parts).flatten(1)

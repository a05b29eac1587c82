"""Layers of attention, what they give in float64, and their pools in the native module, used step by step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferencex.runtime.backends.base import StepBatch
from inferencex.runtime.backends.cpu.native import _cpu
from tests.runtime.backends.cpu.operations import Argument, finish, operand

Float = NDArray[np.float32]
Double = NDArray[np.float64]

ISAS = _cpu.available_isas()
KV_DTYPES = ("float32", "float16", "bfloat16", "int8")
# Largest error allowed, relative to the largest value: half a unit of what keys, values, queries and weights are
# rounded to, times a few for what a softmax makes of it.
TOLERANCES = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2, "int8": 3e-2}


@dataclass(frozen=True)
class Layer:
    """A node's attributes and tables, and the pool that its keys and values live in."""

    heads: int = 6
    kv_heads: int = 2
    key_width: int = 32
    value_width: int = 32
    block_size: int = 16
    kv_dtype: str = "float32"
    scale: float = 0.25
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: bool = False
    slopes: bool = False
    rotary_dim: int | None = None  # 0: all columns; None: no rotation
    interleaved: bool = False
    table: bool = True  # cos and sin by position, else by token
    num_blocks: int = 160
    kv_scales: tuple[tuple[float, ...], tuple[float, ...]] | None = None  # of keys and of values, by head

    def attributes(self) -> dict[str, Any]:
        return {
            "num_kv_heads": self.kv_heads,
            "key_width": self.key_width,
            "value_width": self.value_width,
            "block_size": self.block_size,
            "num_blocks": self.num_blocks,
            "kv_dtype": self.kv_dtype,
            "dim": self.rotary_dim or 0,
            "interleaved": int(self.interleaved),
        }

    def attention_attributes(self) -> dict[str, Any]:
        return self.attributes() | {
            "num_heads": self.heads,
            "scale": self.scale,
            "window": self.window,
            "chunk": self.chunk,
            "softcap": self.softcap,
        }

    def sink_logits(self) -> Float | None:
        return np.linspace(-1, 2, self.heads, dtype=np.float32) if self.sinks else None

    def alibi_slopes(self) -> Float | None:
        return np.linspace(0.05, 0.5, self.heads, dtype=np.float32) if self.slopes else None

    def angles(self, positions: NDArray[Any]) -> Double:
        dim = self.rotary_dim or self.key_width
        return positions[:, None] / 1000.0 ** (np.arange(dim // 2) * 2 / dim)


@dataclass
class Tokens:
    """The queries, keys and values of a whole sequence."""

    q: Float
    k: Float
    v: Float

    @classmethod
    def random(cls, layer: Layer, length: int, seed: int) -> Tokens:
        rng = np.random.default_rng(seed)
        return cls(
            rng.standard_normal((length, layer.heads, layer.key_width), dtype=np.float32),
            rng.standard_normal((length, layer.kv_heads, layer.key_width), dtype=np.float32),
            rng.standard_normal((length, layer.kv_heads, layer.value_width), dtype=np.float32),
        )

    def __len__(self) -> int:
        return len(self.q)


def rotated(layer: Layer, x: NDArray[Any]) -> Double:
    """Rotate `x [L, heads, Dk]` at positions 0 to L - 1."""
    y = x.astype(np.float64)
    if layer.rotary_dim is None:
        return y
    angles = layer.angles(np.arange(len(x)))[:, None, :]
    dim = angles.shape[-1] * 2
    first, second = (
        (slice(0, dim, 2), slice(1, dim, 2)) if layer.interleaved else (slice(0, dim // 2), slice(dim // 2, dim))
    )
    a, b = y[..., first].copy(), y[..., second].copy()
    y[..., first] = a * np.cos(angles) - b * np.sin(angles)
    y[..., second] = b * np.cos(angles) + a * np.sin(angles)
    return y


def expected(layer: Layer, tokens: Tokens) -> Double:
    """Attention as the dialect defines it: `[L, H * Dv]` in float64."""
    group = layer.heads // layer.kv_heads
    q = rotated(layer, tokens.q)
    k = rotated(layer, tokens.k).repeat(group, 1)
    v = tokens.v.astype(np.float64).repeat(group, 1)
    scores = np.einsum("thd,lhd->htl", q, k) * layer.scale
    if layer.softcap:
        scores = layer.softcap * np.tanh(scores / layer.softcap)
    at, query = np.arange(len(tokens))[None, :], np.arange(len(tokens))[:, None]
    slopes = layer.alibi_slopes()
    if slopes is not None:
        scores = scores + slopes[:, None, None].astype(np.float64) * (at - query)
    visible = at <= query
    if layer.window:
        visible &= query - at < layer.window
    if layer.chunk:
        visible &= query // layer.chunk == at // layer.chunk
    scores = np.where(visible, scores, -np.inf)
    sinks = layer.sink_logits()
    most = scores.max(-1, keepdims=True)
    weights = np.exp(scores - most)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None].astype(np.float64) - most)
    y: Double = np.einsum("htl,lhd->thd", weights / total, v).reshape(len(tokens), -1)
    return y


@functools.cache
def case(layer: Layer, length: int) -> tuple[Tokens, Double]:
    """Random tokens of a sequence and what attention makes of them."""
    tokens = Tokens.random(layer, length, length)
    return tokens, expected(layer, tokens)


def batch_of(pieces: Sequence[tuple[int, int]], tables: Sequence[Sequence[int]]) -> StepBatch:
    """A step of sequences that each bring the positions `start` to `stop`."""
    counts = [stop - start for start, stop in pieces]
    total, width = sum(counts), max(len(table) for table in tables)
    positions = np.concatenate([np.arange(start, stop) for start, stop in pieces]).astype(np.int32)
    return StepBatch(
        token_ids=np.zeros(total, np.int32),
        positions=positions,
        sequence_offsets=np.cumsum([0, *counts], dtype=np.int32),
        context_lengths=np.array([stop for _, stop in pieces], np.int32),
        block_tables=np.array([[*table, *[-1] * (width - len(table))] for table in tables], np.int32),
        logit_rows=np.zeros(1, np.int32),
        prompt_lengths=np.zeros(total, np.int32),
    )


def spread(x: Float) -> Float:
    """The same `[T, heads, width]` as a strided view, each head and token away from the next."""
    wide = np.full((x.shape[0], x.shape[1] + 1, x.shape[2] + 3), np.nan, np.float32)
    view = wide[:, 1:, 2:-1]
    view[...] = x
    return view


@dataclass
class Cache:
    """A layer's pool in the native module, used step by step."""

    layer: Layer
    isa: str = field(default_factory=lambda: ISAS[0])
    threads: int = 1

    def __post_init__(self) -> None:
        layer = self.layer
        size = _cpu.state_bytes(
            layer.num_blocks, layer.block_size, layer.kv_heads, layer.key_width, layer.value_width, layer.kv_dtype
        )
        space = np.zeros(size + 64, np.uint8)
        start = -space.__array_interface__["data"][0] % 64
        self.space, self.state = space, space[start : start + size]

    def step(self, sequences: Sequence[Tokens], pieces: Sequence[tuple[int, int]], tables: Sequence[Any]) -> Float:
        """Store and attend the tokens at `pieces` of each sequence; return `[T, H * Dv]`."""
        q, k, v = (
            np.concatenate([getattr(s, name)[a:b] for s, (a, b) in zip(sequences, pieces, strict=True)])
            for name in "qkv"
        )
        layer, batch = self.layer, batch_of(pieces, tables)
        y = np.full((len(q), layer.heads * layer.value_width), np.nan, np.float32)
        rotation: list[Argument] = [None, None, None]
        if layer.rotary_dim is not None:
            table = np.arange(4096) if layer.table else batch.positions
            angles = layer.angles(table)
            rotation[:2] = [np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)]
            if layer.table:
                rotation[2] = batch.positions.astype(np.int64)
        program = _cpu.Program(self.threads, isa=self.isa)

        def add(kind: str, inputs: Sequence[Argument], outputs: Sequence[Argument], attributes: dict[str, Any]) -> None:
            places = [operand(program, item) for item in inputs], [operand(program, item) for item in outputs]
            program.add(kind, "test", *places, attributes)

        scales = [np.array(numbers, np.float32) for numbers in layer.kv_scales or ()]
        add("StoreKV", [spread(k), spread(v), *rotation, self.state, *scales], [], layer.attributes())
        inputs = [spread(q), layer.sink_logits(), layer.alibi_slopes(), *rotation, self.state]
        add("Attention", inputs, [y], layer.attention_attributes())
        finish(program)
        program.run(
            len(batch.token_ids),
            1,
            batch.positions,
            batch.sequence_offsets,
            batch.context_lengths,
            batch.block_tables,
        )
        return y


def tables_for(layer: Layer, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Blocks of each sequence, all over the pool."""
    blocks = iter(np.random.default_rng(seed).permutation(layer.num_blocks).tolist())
    return [[next(blocks) for _ in range(-(-length // layer.block_size))] for length in lengths]


def in_chunks(cache: Cache, tokens: Tokens, cuts: Sequence[int], table: Sequence[int]) -> Float:
    """The whole sequence, cut into steps at `cuts`."""
    steps = pairwise([0, *cuts, len(tokens)])
    return np.concatenate([cache.step([tokens], [piece], [table]) for piece in steps])


def check(layer: Layer, length: int, isa: str, cuts: Sequence[int] = (), threads: int = 1) -> None:
    """Hold one sequence, cut into steps at `cuts`, to the reference."""
    tokens, reference = case(replace(layer, kv_dtype="float32"), length)
    y = in_chunks(Cache(layer, isa, threads), tokens, cuts, tables_for(layer, [length])[0])
    error = np.abs(y - reference).max() / np.abs(reference).max()
    assert error < TOLERANCES[layer.kv_dtype]

"""StoreKV and Attention of the CPU backend against attention in float64, and their independence of the batch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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


LAYERS = {
    "plain": Layer(),
    "one group": Layer(heads=5, kv_heads=1),
    "many heads": Layer(heads=20, kv_heads=1, key_width=64, value_width=64),
    "no groups": Layer(heads=3, kv_heads=3),
    "widths 12 20": Layer(key_width=12, value_width=20),
    "widths 7 5": Layer(key_width=7, value_width=5),
    "widths 192 128": Layer(key_width=192, value_width=128, scale=0.07),
    "widths 96 80": Layer(key_width=96, value_width=80, scale=0.1),
    "width 256": Layer(heads=2, kv_heads=1, key_width=256, value_width=256, scale=0.06),
    "window": Layer(window=37),
    "window of one": Layer(window=1),
    "chunk": Layer(chunk=50),
    "window in chunk": Layer(window=20, chunk=48),
    "softcap": Layer(softcap=1.5),
    "sinks": Layer(sinks=True, window=30),
    "slopes": Layer(slopes=True),
    "everything": Layer(window=90, softcap=3.0, sinks=True, slopes=True, rotary_dim=16),
    "rotated": Layer(rotary_dim=0),
    "partly rotated": Layer(rotary_dim=12, table=False),
    "interleaved": Layer(rotary_dim=20, interleaved=True),
    "blocks of 1": Layer(block_size=1),
    "blocks of 4": Layer(block_size=4),
    "blocks of 5": Layer(block_size=5, window=33),
    "blocks of 20": Layer(block_size=20),
    "blocks of 32": Layer(block_size=32),
    "blocks of 48": Layer(block_size=48),
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_agrees_with_float64(name: str, kv_dtype: str, isa: str) -> None:
    check(replace(LAYERS[name], kv_dtype=kv_dtype), 150, isa, cuts=(67, 68, 70))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_long_contexts_agree_with_float64(kv_dtype: str, isa: str) -> None:
    check(Layer(kv_dtype=kv_dtype), 1100, isa, cuts=(1024, 1099), threads=2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(
    "layer",
    [
        Layer(),
        Layer(heads=7, kv_heads=1, window=600, sinks=True),
        Layer(block_size=5, num_blocks=300, softcap=2.0, slopes=True),
        Layer(kv_heads=6, key_width=20, value_width=12, rotary_dim=0, chunk=700),
    ],
    ids=["plain", "window", "small blocks", "chunk"],
)
def test_results_are_independent_of_chunking_threads_and_blocks(layer: Layer, kv_dtype: str, isa: str) -> None:
    layer = replace(layer, kv_dtype=kv_dtype)
    length = 560 if layer.block_size == 5 else 1060  # more than two chunks of keys either way
    tokens = Tokens.random(layer, length, 3)
    tables = tables_for(layer, [length]), tables_for(layer, [length], seed=1)
    whole = in_chunks(Cache(layer, isa), tokens, (), tables[0][0])
    last = [*range(length - 4, length)]
    for threads, cuts, table in [(2, last, tables[1][0]), (3, [1, 130, 515, *last], tables[0][0])]:
        assert np.array_equal(in_chunks(Cache(layer, isa, threads), tokens, cuts, table), whole)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("window", [72, 80, 134])
def test_what_a_window_leaves_is_independent_of_chunking(window: int, kv_dtype: str) -> None:
    """Queries side by side in a long step, of which some see keys that the others do not see any more."""
    layer = Layer(heads=4, kv_heads=4, window=window, kv_dtype=kv_dtype)
    for seed in range(4):
        tokens = Tokens.random(layer, 450, seed)
        table = tables_for(layer, [450])[0]
        whole = in_chunks(Cache(layer), tokens, (), table)
        assert np.array_equal(in_chunks(Cache(layer), tokens, range(3, 450, 3), table), whole)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_sequence_is_independent_of_its_neighbours(kv_dtype: str, threads: int) -> None:
    layer = Layer(kv_dtype=kv_dtype, heads=3, kv_heads=1, rotary_dim=0)
    rng = np.random.default_rng(5)
    lengths = [600, *rng.integers(2, 60, 31).tolist()]
    sequences = [Tokens.random(layer, length, i) for i, length in enumerate(lengths)]
    tables = tables_for(layer, lengths)
    cache = Cache(layer, threads=threads)
    starts = [int(rng.integers(1, length)) if i % 3 else length - 1 for i, length in enumerate(lengths)]
    cache.step(sequences, [(0, start) for start in starts], tables)
    together = cache.step(sequences, list(zip(starts, lengths, strict=True)), tables)
    row = 0
    for sequence, start, table in zip(sequences, starts, tables, strict=True):
        alone = Cache(layer)
        y = in_chunks(alone, sequence, (start,), table)[start:]
        assert np.array_equal(together[row : row + len(y)], y)
        row += len(y)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_what_earlier_tokens_left_in_a_block_has_no_influence(kv_dtype: str) -> None:
    layer = Layer(num_blocks=4, block_size=32, kv_dtype=kv_dtype)
    old, new = Tokens.random(layer, 100, 0), Tokens.random(layer, 41, 1)
    old.v[:] = np.inf
    old.k[:] = np.nan
    cache = Cache(layer)
    cache.step([old], [(0, 100)], [[0, 1, 2, 3]])
    reused = in_chunks(cache, new, (30,), [3, 0])
    assert np.array_equal(reused, in_chunks(Cache(layer), new, (30,), [3, 0]))


def test_nothing_outside_the_pool_is_touched_when_a_table_is_wrong() -> None:
    layer = Layer(num_blocks=4)
    tokens = Tokens.random(layer, 40, 0)
    cache = Cache(layer)
    before = cache.space.copy()
    for table in ([2**30, -1, 4], [-(2**31), 2**31 - 1, 4]):
        cache.step([tokens], [(0, 40)], [table])
    assert np.array_equal(cache.space, before)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_layer_and_any_steps_agree(data: st.DataObject) -> None:
    draw = data.draw
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    key_width = draw(st.integers(1, 70))
    layer = Layer(
        heads=kv_heads * group,
        kv_heads=kv_heads,
        key_width=key_width,
        value_width=draw(st.integers(1, 70)),
        block_size=draw(st.sampled_from([1, 3, 8, 16, 17, 64, 80])),
        kv_dtype=draw(st.sampled_from(KV_DTYPES)),
        window=draw(st.sampled_from([0, 1, 16, 70])),
        chunk=draw(st.sampled_from([0, 33, 64])),
        softcap=draw(st.sampled_from([0.0, 2.0])),
        sinks=draw(st.booleans()),
        slopes=draw(st.booleans()),
        rotary_dim=draw(st.sampled_from([None, *range(0, key_width // 2 * 2 + 1, 2)])) if key_width > 1 else None,
        interleaved=draw(st.booleans()),
        table=draw(st.booleans()),
        scale=1.0 / key_width**0.5,
        num_blocks=400,
    )
    if layer.rotary_dim == 0 and key_width % 2:
        layer = replace(layer, rotary_dim=2)
    length = draw(st.integers(1, 300))
    cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=3))) if length > 1 else []
    check(layer, length, draw(st.sampled_from(ISAS)), cuts, draw(st.integers(1, 3)))


def refused(layer: Layer, message: str, kind: str = "Attention", **changes: Any) -> None:
    """Build one operation with `changes` to its operands and attributes; it must say `message`."""
    cache = Cache(layer)
    rows = 3
    arrays: dict[str, Argument] = {
        "q": np.zeros((rows, layer.heads, layer.key_width), np.float32),
        "k": np.zeros((rows, layer.kv_heads, layer.key_width), np.float32),
        "v": np.zeros((rows, layer.kv_heads, layer.value_width), np.float32),
        "sinks": None,
        "slopes": None,
        "cos": None,
        "sin": None,
        "positions": None,
        "state": cache.state,
        "key_scales": None,
        "value_scales": None,
        "y": np.zeros((rows, layer.heads * layer.value_width), np.float32),
    } | {name: value for name, value in changes.items() if not isinstance(value, int | float | str)}
    attributes = layer.attention_attributes()
    attributes |= {name: value for name, value in changes.items() if isinstance(value, int | float | str)}
    names = (
        ["k", "v", "cos", "sin", "positions", "state", "key_scales", "value_scales"]
        if kind == "StoreKV"
        else ["q", "sinks", "slopes", "cos", "sin", "positions", "state"]
    )
    program = _cpu.Program(1)
    outputs = [operand(program, arrays["y"])] if kind == "Attention" else []
    with pytest.raises(_cpu.BlueprintError, match=message):
        program.add(kind, "test", [operand(program, arrays[name]) for name in names], outputs, attributes)


def test_malformed_blueprints_are_refused() -> None:
    layer = Layer()
    table = np.zeros((8, 16), np.float32)
    refused(layer, "kv_dtype is 'float8'", kv_dtype="float8")
    refused(layer, "num_heads 5 is no multiple", num_heads=5)
    refused(layer, "block_size is 0", block_size=0)
    refused(layer, "state has .* bytes, expected", num_blocks=161)
    refused(layer, "larger than can be addressed", num_blocks=2**30, block_size=2**30)
    refused(layer, "dimension 2 of q is 32, expected 33", key_width=33, num_blocks=1)
    refused(layer, "softcap is negative", softcap=-1.0)
    refused(layer, "scale is not finite", scale=float("nan"))
    refused(layer, "cos and sin are not given together", cos=table)
    refused(layer, "dim is 34, expected 0 to 32", cos=table, sin=table, dim=34)
    refused(layer, "dim is 7, expected an even number", cos=table, sin=table, dim=7)
    refused(layer, "dimension 1 of cos is 16, expected 8", cos=table, sin=table, dim=16)
    refused(layer, "different numbers of rows", cos=table, sin=table[1:])
    refused(layer, "wrong type", cos=table, sin=table, positions=np.zeros(3, np.int32))
    refused(layer, "dimension 0 of sinks is 5", sinks=np.zeros(5, np.float32))
    refused(layer, "q is missing", q=None)
    refused(layer, "q has 2 dimensions", q=np.zeros((3, 32), np.float32))
    refused(layer, "not contiguous", q=np.zeros((3, 6, 64), np.float32)[:, :, ::2])
    refused(layer, "state is missing", state=None)
    refused(layer, "dimension 1 of v is 3, expected 2", kind="StoreKV", v=np.zeros((3, 3, 32), np.float32))
    refused(layer, "window is -1", window=-1)
    ones = np.ones(2, np.float32)
    refused(layer, "not given together", kind="StoreKV", kv_dtype="int8", num_blocks=9, key_scales=ones)
    refused(layer, "scales are for pages of int8", kind="StoreKV", key_scales=ones, value_scales=ones)
    refused(layer, "dimension 0 of scales is 1, expected 2", kind="StoreKV", key_scales=ones[1:], value_scales=ones)
    with pytest.raises(_cpu.BlueprintError, match="kv_dtype is 'int4'"):
        _cpu.state_bytes(1, 16, 1, 64, 64, "int4")
    with pytest.raises(_cpu.BlueprintError, match="no pool can have 0 blocks"):
        _cpu.state_bytes(0, 16, 1, 64, 64, "float32")


def test_pools_take_the_bytes_of_their_tokens() -> None:
    for kv_dtype, bytes_per_number in (("float32", 4), ("float16", 2), ("bfloat16", 2)):
        assert _cpu.state_bytes(10, 32, 3, 64, 64, kv_dtype) == 10 * 32 * 3 * 128 * bytes_per_number
    assert _cpu.state_bytes(10, 32, 3, 64, 64, "int8") == 10 * 32 * 3 * (128 + 2 * 4)

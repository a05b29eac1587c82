"""What is tried on a GPU: each kernel on the shapes of a model, beside a plain formula in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.gpu.predictions import scheme
from inferencex.runtime.backends.triton.attention_tiles import plan_tiles
from inferencex.runtime.backends.triton.kernels.activation import gated_activation
from inferencex.runtime.backends.triton.kernels.attention import AttentionStep, attention, rows_per_tile
from inferencex.runtime.backends.triton.kernels.experts import expert_linear
from inferencex.runtime.backends.triton.kernels.kv_pages import KVPages
from inferencex.runtime.backends.triton.kernels.kv_write import write_kv
from inferencex.runtime.backends.triton.kernels.linear import linear
from inferencex.runtime.backends.triton.kernels.norms import add_rms_norm, normalize
from inferencex.runtime.backends.triton.kernels.quantize_rows import Quantization, quantize_rows
from inferencex.runtime.backends.triton.kernels.sampling import sample
from inferencex.runtime.backends.triton.kernels.scaled_linear import scaled_linear
from inferencex.runtime.backends.triton.weights import from_canonical

IntArray = NDArray[np.int32]
Bound = Literal["bandwidth", "matmul"]
_GROUP, _BLOCK_SIZE = 64, 16


@dataclass(frozen=True)
class Sizes:
    """Shapes of a decoder: `prompt` tokens of a prefill, `context` of a decode step, `batches` of sequences."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    prompt: int
    context: int
    batches: tuple[int, ...]


EIGHT_BILLION = Sizes(4096, 14336, 32, 8, 128, 128256, 2048, 4096, (1, 8, 32))
TINY = Sizes(128, 192, 4, 2, 16, 160, 12, 40, (1, 3))
"""For the interpreter."""


@dataclass(frozen=True)
class Case:
    """A kernel on one shape.

    nbytes, operations: what it has to move and compute at the least
    bound:              what limits it
    predicted:          the fraction of this limit that it is expected to reach on an H200; None where nothing was said
    numbers:            turns what `run` gives into what `expected` gives, untimed; None where it is that already
    tolerance:          largest difference from `expected`, as a part of its largest magnitude
    """

    name: str
    run: Callable[[], Any]
    expected: Callable[[], Tensor]
    tolerance: float
    nbytes: int
    operations: int
    bound: Bound
    predicted: float | None = None
    numbers: Callable[[Any], Tensor] | None = None


def all_cases(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yield the cases, each made when it is asked for, so that one's memory is free before the next."""
    generator = torch.Generator(device=device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)

    for tokens in (*sizes.batches, sizes.prompt):
        for name, rows, features in (("gate-up", 2 * sizes.ffn, sizes.hidden), ("down", sizes.hidden, sizes.ffn)):
            yield _int4(name, tokens, rows, features, random, device, dtype, tokens == sizes.prompt)
    yield _float4("NVFP4", 16, sizes, random, device, dtype)
    yield _float4("MXFP4", 32, sizes, random, device, dtype)
    yield _scaled("INT8", torch.int8, sizes, random, dtype)
    yield _scaled("FP8", torch.float8_e4m3fn, sizes, random, dtype)
    for sequences in sizes.batches:
        yield _decode_attention(sequences, sizes, random, device, dtype)
    yield _prefill_attention(sizes, random, device, dtype)
    yield _experts(sizes, random, device, dtype)
    yield _norm(sizes, random, dtype)
    yield _quantized_norm(sizes, random, dtype)
    yield _gate(sizes, random, dtype)
    yield _sampling(sizes, random, device)


def _int4(
    name: str,
    tokens: int,
    rows: int,
    features: int,
    random: Callable[..., Tensor],
    device: torch.device,
    dtype: torch.dtype,
    is_prefill: bool,
) -> Case:
    packed = torch.randint(0, 256, (rows * features // 2,), dtype=torch.uint8, device=device)
    groups = features // _GROUP
    scales = (random(rows, groups).abs() * 0.01 + 0.001).to(torch.float16)
    zeros = torch.randint(0, 256, (rows * groups // 2,), dtype=torch.uint8, device=device)
    weight = from_canonical(packed, scales, zeros, shape=(rows, features), bits=4, signed=False, group_size=_GROUP)
    x = random(tokens, features).to(dtype)

    def expected() -> Tensor:
        numbers = torch.stack((packed & 15, packed >> 4), -1).view(rows, groups, _GROUP).to(torch.float32)
        offsets = torch.stack((zeros & 15, zeros >> 4), -1).view(rows, groups, 1).to(torch.float32)
        plain = ((numbers - offsets) * scales.to(torch.float32)[..., None]).view(rows, features)
        return x.to(torch.float32) @ plain.T

    return Case(
        f"INT4 linear {name} {rows} x {features}, {tokens} tokens",
        lambda: linear(x, weight),
        expected,
        _tolerance(dtype),
        weight.nbytes + (tokens * features + tokens * rows) * dtype.itemsize,
        2 * tokens * rows * features,
        "matmul" if is_prefill else "bandwidth",
        0.65 if is_prefill else scheme("int4", _GROUP, is_symmetric=False).predicted if tokens == 1 else None,
    )


def _float4(
    name: str, group: int, sizes: Sizes, random: Callable[..., Tensor], device: torch.device, dtype: torch.dtype
) -> Case:
    rows, features = 2 * sizes.ffn, sizes.hidden
    packed = torch.randint(0, 256, (rows * features // 2,), dtype=torch.uint8, device=device)
    numbers = random(rows, features // group).abs() + 0.01
    is_nvfp4 = group == 16
    scales = (
        numbers.to(torch.float8_e4m3fn) if is_nvfp4 else torch.exp2(numbers.log2().round()).to(torch.float8_e8m0fnu)
    )
    weight = from_canonical(
        packed, scales, shape=(rows, features), bits=4, number="e2m1", group_size=group, tensor_scale=0.25
    )
    x = random(1, features).to(dtype)

    def expected() -> Tensor:
        table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=device)
        codes = torch.stack((packed & 15, packed >> 4), -1).view(rows, -1, group)
        values = table[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0)
        plain = (values * scales.to(torch.float32)[..., None] * 0.25).view(rows, features)
        return x.to(torch.float32) @ plain.T

    return Case(
        f"{name} linear {rows} x {features}, 1 token",
        lambda: linear(x, weight),
        expected,
        _tolerance(dtype),
        weight.nbytes + (features + rows) * dtype.itemsize,
        2 * rows * features,
        "bandwidth",
        scheme("e2m1", group, is_symmetric=True).predicted,
    )


def _experts(sizes: Sizes, random: Callable[..., Tensor], device: torch.device, dtype: torch.dtype) -> Case:
    """Eight experts' INT4 matrices, each for one assignment, as decoding reads them."""
    count, rows, features = 8, sizes.ffn // 4, sizes.hidden
    packed = torch.randint(0, 256, (count * rows * features // 2,), dtype=torch.uint8, device=device)
    scales = (random(count, rows, features // _GROUP).abs() * 0.01 + 0.001).to(torch.float16)
    weight = from_canonical(packed, scales, shape=(count, rows, features), bits=4, group_size=_GROUP)
    ids, x = torch.arange(count, device=device), random(count, features).to(dtype)

    def expected() -> Tensor:
        numbers = torch.stack((packed & 15, packed >> 4), -1).view(count, rows, -1, _GROUP).to(torch.float32)
        numbers = numbers - 16 * (numbers >= 8)  # two's complement
        plain = (numbers * scales.to(torch.float32)[..., None]).view(count, rows, features)
        return torch.einsum("mk,mnk->mn", x.to(torch.float32), plain)

    return Case(
        f"INT4 experts {count} x {rows} x {features}, an assignment each",
        lambda: expert_linear(x, ids, weight),
        expected,
        _tolerance(dtype),
        weight.nbytes + count * (features + rows) * dtype.itemsize,
        2 * count * rows * features,
        "bandwidth",
    )


def _scaled(name: str, kind: torch.dtype, sizes: Sizes, random: Callable[..., Tensor], dtype: torch.dtype) -> Case:
    rows, features, tokens = 2 * sizes.ffn, sizes.hidden, sizes.prompt
    values, scales = quantize_rows(random(rows, features), kind)
    weight = from_canonical(
        values, scales, shape=(rows, features), bits=8, number="int" if kind == torch.int8 else "e4m3", layout="rows"
    )
    x, x_scales = quantize_rows(random(tokens, features).to(dtype), kind)

    def expected() -> Tensor:
        left = x.to(torch.float32) * x_scales[:, None]
        return left @ (values.to(torch.float32) * scales[:, None]).T

    return Case(
        f"{name} W8A8 linear {rows} x {features}, {tokens} tokens",
        lambda: scaled_linear(x, x_scales, weight, out_dtype=dtype),
        expected,
        _tolerance(dtype),
        rows * features + tokens * (features + rows * dtype.itemsize),
        2 * tokens * rows * features,
        "matmul",
    )


def _pages(
    sequences: int, length: int, sizes: Sizes, random: Callable[..., Tensor], device: torch.device, dtype: torch.dtype
) -> tuple[KVPages, Tensor, Tensor, IntArray]:
    """Return pages that hold `length` keys and values of each sequence, these, and the block tables."""
    blocks = -(-length // _BLOCK_SIZE)
    order = np.random.default_rng(0).permutation(sequences * blocks).astype(np.int32)
    tables = order.reshape(sequences, blocks)
    pages = KVPages.allocate(
        sequences * blocks, _BLOCK_SIZE, sizes.kv_heads, sizes.head_dim, sizes.head_dim, dtype, device
    )
    width = sizes.kv_heads * sizes.head_dim
    keys, values = (random(sequences * length, width).to(dtype) for _ in range(2))
    positions = np.tile(np.arange(length), sequences)
    owners = np.repeat(np.arange(sequences), length)
    slots = tables[owners, positions // _BLOCK_SIZE].astype(np.int64) * _BLOCK_SIZE + positions % _BLOCK_SIZE
    write_kv(keys, values, pages, torch.from_numpy(slots).to(device))
    return pages, keys, values, tables


def _step(
    counts: list[int], contexts: list[int], tables: IntArray, tile_rows: int, device: torch.device
) -> AttentionStep:
    offsets = np.cumsum([0, *counts]).astype(np.int32)
    lengths = np.array(contexts, np.int32)
    planned = plan_tiles(offsets, lengths, tile_rows)

    def put(array: NDArray[np.integer[Any]]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return AttentionStep(
        slots=put(np.zeros(offsets[-1], np.int64)),
        sequence_offsets=put(offsets),
        context_lengths=put(lengths),
        block_tables=put(tables),
        tiles=put(planned.tiles),
        tile_rows=tile_rows,
        decode_sequences=put(planned.decode_sequences),
        decode_groups=planned.decode_groups,
        keys_before=put(planned.keys_before),
        longest_context=max(contexts),
    )


def _attended(q: Tensor, keys: Tensor, values: Tensor, sizes: Sizes, sequences: int) -> Tensor:
    """Attend the last queries of each sequence over its keys, in torch."""
    heads = [part.to(torch.float32).view(sequences, -1, count, sizes.head_dim).transpose(1, 2) for part, count in
             ((q, sizes.heads), (keys, sizes.kv_heads), (values, sizes.kv_heads))]  # fmt: skip
    new, length = heads[0].shape[2], heads[1].shape[2]
    mask = torch.ones(new, length, dtype=torch.bool, device=q.device).tril(length - new)
    out = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2).reshape(q.shape[0], -1)


def _decode_attention(
    sequences: int, sizes: Sizes, random: Callable[..., Tensor], device: torch.device, dtype: torch.dtype
) -> Case:
    pages, keys, values, tables = _pages(sequences, sizes.context, sizes, random, device, dtype)
    step = _step([1] * sequences, [sizes.context] * sequences, tables, 1, device)
    q = random(sequences, sizes.heads * sizes.head_dim).to(dtype)
    moved = 2 * sequences * sizes.context * sizes.kv_heads * sizes.head_dim * dtype.itemsize
    return Case(
        f"decode attention, {sequences} x {sizes.context} tokens",
        lambda: attention(
            q, pages, step, num_heads=sizes.heads, num_kv_heads=sizes.kv_heads, scale=sizes.head_dim**-0.5
        ),
        lambda: _attended(q, keys, values, sizes, sequences),
        _tolerance(dtype),
        moved,
        4 * sequences * sizes.context * sizes.heads * sizes.head_dim,
        "bandwidth",
        0.7 if sequences > 1 else None,
    )


def _prefill_attention(sizes: Sizes, random: Callable[..., Tensor], device: torch.device, dtype: torch.dtype) -> Case:
    pages, keys, values, tables = _pages(1, sizes.prompt, sizes, random, device, dtype)
    tile_rows = rows_per_tile(device, sizes.heads, pages, dtype)
    step = _step([sizes.prompt], [sizes.prompt], tables, tile_rows, device)
    q = random(sizes.prompt, sizes.heads * sizes.head_dim).to(dtype)
    return Case(
        f"prefill attention, {sizes.prompt} tokens",
        lambda: attention(
            q, pages, step, num_heads=sizes.heads, num_kv_heads=sizes.kv_heads, scale=sizes.head_dim**-0.5
        ),
        lambda: _attended(q, keys, values, sizes, 1),
        _tolerance(dtype),
        2 * (sizes.heads + sizes.kv_heads) * sizes.prompt * sizes.head_dim * dtype.itemsize,
        2 * sizes.prompt * sizes.prompt * sizes.heads * sizes.head_dim,  # half of it is masked
        "matmul",
    )


def _norm(sizes: Sizes, random: Callable[..., Tensor], dtype: torch.dtype) -> Case:
    x, residual = (random(sizes.prompt, sizes.hidden).to(dtype) for _ in range(2))
    scale = random(sizes.hidden)

    def expected() -> Tensor:
        total = x.to(torch.float32) + residual.to(torch.float32)
        return total * torch.rsqrt(total.square().mean(-1, True) + 1e-5) * scale

    nbytes = 4 * x.numel() * dtype.itemsize
    return Case(
        f"residual + RMSNorm, {sizes.prompt} x {sizes.hidden}",
        lambda: add_rms_norm(x, residual, scale, 1e-5)[0], expected, _tolerance(dtype), nbytes, 0, "bandwidth",
    )  # fmt: skip


def _quantized_norm(sizes: Sizes, random: Callable[..., Tensor], dtype: torch.dtype) -> Case:
    x, residual = (random(sizes.prompt, sizes.hidden).to(dtype) for _ in range(2))
    scale, quantization = random(sizes.hidden), Quantization(torch.int8)

    def run() -> Any:
        return normalize(x, scale, 1e-5, residual=residual, quantization=quantization).quantized

    def expected() -> Tensor:
        total = x.to(torch.float32) + residual.to(torch.float32)
        return total * torch.rsqrt(total.square().mean(-1, True) + 1e-5) * scale

    return Case(
        f"residual + RMSNorm + INT8 rows, {sizes.prompt} x {sizes.hidden}",
        run,
        expected,
        1e-2,  # half a step of 127 in the row with the largest number
        x.numel() * (3 * dtype.itemsize + 1),
        0,
        "bandwidth",
        numbers=lambda quantized: quantized.values.to(torch.float32) * quantized.scales[:, None],
    )


def _gate(sizes: Sizes, random: Callable[..., Tensor], dtype: torch.dtype) -> Case:
    x = random(sizes.prompt, 2 * sizes.ffn).to(dtype)

    def expected() -> Tensor:
        gate, up = x.to(torch.float32).chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    nbytes = x.numel() * 3 // 2 * dtype.itemsize
    return Case(
        f"gated activation, {sizes.prompt} x {sizes.ffn}",
        lambda: gated_activation(x, "silu"), expected, _tolerance(dtype), nbytes, 0, "bandwidth",
    )  # fmt: skip


def _sampling(sizes: Sizes, random: Callable[..., Tensor], device: torch.device) -> Case:
    rows = sizes.batches[-1]
    logits = random(rows, sizes.vocab) * 3

    def full(value: float) -> Tensor:
        return torch.full((rows,), value, dtype=torch.float64, device=device)

    top_k = torch.full((rows,), 1, dtype=torch.int32, device=device)
    return Case(
        f"sampling, {rows} x {sizes.vocab}",
        lambda: sample(logits, full(1.0), top_k, full(0.9), full(0.0), full(0.5)).to(torch.float32),
        lambda: logits.argmax(-1).to(torch.float32),
        0.0,
        logits.numel() * 4,
        0,
        "bandwidth",
    )


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]

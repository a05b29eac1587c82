"""Keys and values with calibrated scales, in native pages: what is attended to is what the dialect says is kept."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from inferencex.formats.dialect.reference import keep_in_8_bits
from inferencex.formats.dtypes import DataType
from tests.runtime.backends.cpu.attention_layers import (
    ISAS,
    Cache,
    Double,
    Float,
    Layer,
    Tokens,
    expected,
    in_chunks,
    rotated,
    tables_for,
)

# By the type of pages; scales are powers of two, so that float16 holds what FP8 times a scale says.
TYPES = {"int8": DataType.INT8, "float16": DataType.FLOAT8E4M3FN}
SCALES = {"int8": ((2.0**-5, 2.0**-6), (2.0**-6, 2.0**-4)), "float16": ((2.0**-7, 2.0**-9), (2.0**-8, 2.0**-6))}


def _kept(layer: Layer, x: Float | Double, part: int) -> Float:
    assert layer.kv_scales is not None
    return np.asarray(keep_in_8_bits(x.astype(np.float32), layer.kv_scales[part], TYPES[layer.kv_dtype]))


def _reference(layer: Layer, tokens: Tokens) -> Double:
    """Attend to keys that are rotated, then kept."""
    turned = Tokens(
        rotated(layer, tokens.q).astype(np.float32),
        _kept(layer, rotated(layer, tokens.k), 0),
        _kept(layer, tokens.v, 1),
    )
    return expected(replace(layer, rotary_dim=None), turned)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", TYPES)
@pytest.mark.parametrize("rotary_dim", [None, 0])
def test_attention_reads_what_the_dialect_keeps(isa: str, kv_dtype: str, rotary_dim: int | None) -> None:
    layer = Layer(kv_dtype=kv_dtype, kv_scales=SCALES[kv_dtype], rotary_dim=rotary_dim)
    tokens = Tokens.random(layer, 90, 1)
    tokens.v[17] *= 40  # saturates
    reference = _reference(layer, tokens)
    y = in_chunks(Cache(layer, isa, threads=2), tokens, [7, 60], tables_for(layer, [90])[0])
    # Pages of int8 are multiplied as bfloat16 where the processor does that: queries and weights are rounded to it. A
    # rotated key may lie next to the middle of two numbers, and one of float32 on the other side.
    most = 2e-2 if kv_dtype == "int8" and isa == "avx512_bf16" else 2e-6 if rotary_dim is None else 5e-4
    assert np.abs(y - reference).max() / np.abs(reference).max() < most


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", TYPES)
def test_a_single_token_gives_its_value_back_as_it_is_kept(isa: str, kv_dtype: str) -> None:
    """Every number of the type, every middle of two, and what is beside them or beyond the range."""
    numbers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn if kv_dtype == "float16" else np.int8)
    plain = numbers.astype(np.float64)
    plain = np.unique(plain[np.isfinite(plain)])
    middles = (plain[1:] + plain[:-1]) / 2
    x = np.concatenate([plain, middles, np.nextafter(middles.astype(np.float32), 1e9), [449.0, -1e30, 1e30, 2.0**-40]])
    x = x.astype(np.float32)
    scale = SCALES[kv_dtype][1][0]
    layer = Layer(heads=1, kv_heads=1, value_width=len(x), kv_dtype=kv_dtype, kv_scales=((1.0,), (scale,)))
    zeros = np.zeros((1, 1, layer.key_width), np.float32)
    value = (x * np.float32(scale))[None, None, :]
    y = Cache(layer, isa).step([Tokens(zeros, zeros, value)], [(0, 1)], [[3]])
    np.testing.assert_array_equal(y[0], _kept(layer, value, 1)[0, 0])


def test_what_is_not_finite_is_not_hidden() -> None:
    for kv_dtype in TYPES:
        layer = Layer(kv_dtype=kv_dtype, kv_scales=SCALES[kv_dtype])
        tokens = Tokens.random(layer, 20, 1)
        tokens.v[5, 0, 3] = np.nan
        y = in_chunks(Cache(layer), tokens, [], tables_for(layer, [20])[0]).reshape(20, layer.heads, -1)
        assert np.isnan(y[5:, :3, 3]).all()
        assert np.isfinite(y[:, 3:]).all(), "of the other head"

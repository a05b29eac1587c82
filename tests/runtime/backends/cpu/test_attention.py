"""StoreKV and Attention of the CPU backend against attention in float64, and blueprints that they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferencex.runtime.backends.cpu.native import _cpu
from tests.runtime.backends.cpu.attention_layers import ISAS, KV_DTYPES, Cache, Layer, check
from tests.runtime.backends.cpu.operations import Argument, operand

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

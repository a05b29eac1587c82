"""Joined tensors stand for exactly what their parts stand for."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from inferencex.convert.source.packed.joining import concatenate_rows, rows_of, stack
from inferencex.formats.packing import PER_CHANNEL, QuantizedTensor, group_count, pack_bits

COLUMNS = 36


def integers(
    rows: int, bits: int, group_size: int, symmetric: bool, scale_type: type[np.floating], seed: int
) -> QuantizedTensor:
    """Return a random tensor."""
    rng = np.random.default_rng(seed)
    low = -(1 << (bits - 1)) if symmetric or bits == 8 else 0
    groups = (rows,) if group_size == PER_CHANNEL else (rows, group_count(COLUMNS, group_size))

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        values = rng.integers(low, low + (1 << bits), shape).astype(np.int8)
        return values if bits == 8 else pack_bits(values, bits)

    return QuantizedTensor(
        values=draw((rows, COLUMNS)),
        scales=rng.uniform(0.01, 1, groups).astype(scale_type),
        zero_points=None if symmetric else draw(groups),
        bits=bits,
        group_size=group_size,
        symmetric=symmetric,
        shape=(rows, COLUMNS),
    )


tensors = st.builds(
    integers,
    st.integers(1, 5),
    st.sampled_from([3, 4, 8]),
    st.sampled_from([PER_CHANNEL, 4, 12, 8, 36, 16]),
    st.booleans(),
    st.sampled_from([np.float16, np.float32]),
    st.integers(0, 1000),
)


@settings(deadline=None, max_examples=200)
@given(st.lists(tensors, min_size=1, max_size=3))
def test_rows_of_any_forms(parts: list[QuantizedTensor]) -> None:
    joined = concatenate_rows(parts)
    sizes = [COLUMNS if part.group_size == PER_CHANNEL else part.group_size for part in parts]
    smallest = min((s for s, p in zip(sizes, parts, strict=True) if p.group_size != PER_CHANNEL), default=COLUMNS)
    if joined is None:
        assert any(size % smallest and size < COLUMNS for size in sizes)
        return
    np.testing.assert_array_equal(joined.dequantize(), np.concatenate([part.dequantize() for part in parts]))


@settings(deadline=None, max_examples=50)
@given(tensors, st.integers(0, 5), st.integers(0, 5))
def test_some_rows(tensor: QuantizedTensor, start: int, count: int) -> None:
    start = min(start, tensor.shape[0] - 1)
    stop = min(tensor.shape[0], start + count + 1)
    np.testing.assert_array_equal(rows_of(tensor, start, stop).dequantize(), tensor.dequantize()[start:stop])


@settings(deadline=None, max_examples=50)
@given(st.lists(tensors, min_size=1, max_size=3))
def test_stacks(parts: list[QuantizedTensor]) -> None:
    stacked = stack(parts)
    if len({part.shape for part in parts}) > 1:
        assert stacked is None
    elif stacked is not None:
        np.testing.assert_array_equal(stacked.dequantize(), np.stack([part.dequantize() for part in parts]))


def float4(factor: float) -> QuantizedTensor:
    rng = np.random.default_rng(int(factor))
    return QuantizedTensor(
        values=rng.integers(0, 256, 2 * 16, dtype=np.uint8),
        scales=rng.uniform(0.1, 1, (2, 2)).astype(ml_dtypes.float8_e4m3fn),
        zero_points=None,
        bits=4,
        group_size=16,
        symmetric=True,
        shape=(2, 32),
        number="e2m1",
        tensor_scale=np.asarray(np.float32(factor)),
    )


def test_tensors_that_do_not_go_together() -> None:
    assert concatenate_rows([float4(1.0), float4(2.0)]) is None
    joined = concatenate_rows([float4(3.0), float4(3.0)])
    assert joined is not None
    np.testing.assert_array_equal(joined.dequantize(), np.concatenate([float4(3.0).dequantize()] * 2))
    assert concatenate_rows([float4(1.0), integers(2, 4, 4, True, np.float32, 0)]) is None

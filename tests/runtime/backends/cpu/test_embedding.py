"""Embedding tables of every stored type, read by the CPU backend, against numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inferencex.formats.packing import PER_CHANNEL, group_count, pack_int4
from inferencex.runtime.backends.cpu.native import _cpu
from tests.runtime.backends.cpu.operations import Argument, run_operation
from tests.runtime.backends.cpu.stored_weights import SPECS, Spec, stored_weight

Array = NDArray[Any]

ISAS = _cpu.available_isas()
ROWS = 11
INDICES = np.array([3, 0, 10, 3, 7], np.int64)
WIDTHS = (1, 7, 16, 33, 100, 576)
NARROW = ("f8e4m3", "int3", "int5", "int6", "f4e2m1")


def read(inputs: Sequence[Argument], width: int, attributes: dict[str, Any], threads: int, isa: str) -> Array:
    wide = np.full((len(INDICES), width + 1), 9, np.float32)
    indices = np.stack([INDICES, INDICES * 0], axis=1)[:, 0]  # apart in memory
    run_operation("Embedding", [*inputs, indices], [wide[:, :-1]], attributes, threads=threads, isa=isa)
    assert (wide[:, -1] == 9).all()
    return wide[:, :-1]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2])
def test_floats_are_exact(threads: int, isa: str) -> None:
    for width in WIDTHS:
        table = np.random.default_rng(width).standard_normal((ROWS, width)).astype(np.float32)
        half = table.astype(np.float16)
        brain = (table.view(np.uint32) >> 16).astype(np.uint16)
        widened = (brain.astype(np.uint32) << 16).view(np.float32)
        pairs: list[tuple[Array, Array]] = [(table, table), (half, half.astype(np.float32)), (brain, widened)]
        for stored, expected in pairs:
            y = read([stored, None, None], width, {}, threads, isa)
            np.testing.assert_array_equal(y, expected[INDICES])


@pytest.mark.parametrize("isa", ISAS)
def test_float16_of_every_kind(isa: str) -> None:
    bits = np.arange(2**16, dtype=np.uint16).reshape(-1, 64)
    indices = np.arange(len(bits), dtype=np.int64)
    y = np.zeros(bits.shape, np.float32)
    run_operation("Embedding", [bits.view(np.float16), None, None, indices], [y], {}, isa=isa)
    np.testing.assert_array_equal(y, bits.view(np.float16).astype(np.float32))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scale_type", [np.float16, np.float32])
@pytest.mark.parametrize("kind", ["int8", "int8 asymmetric", "int4", "uint4 asymmetric"])
def test_integers_match_their_dequantized_table(kind: str, scale_type: Any, isa: str) -> None:
    bits, asymmetric = (8 if "8" in kind else 4), "asymmetric" in kind
    signed = not kind.startswith("u")
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 2**bits)
    dtype: Any = np.int8 if signed else np.uint8
    for width, group in [(w, g) for w in WIDTHS for g in (PER_CHANNEL, 5, 16, 32, 64)]:
        rng = np.random.default_rng(width + group)
        values = rng.integers(low, high, (ROWS, width)).astype(dtype)
        groups = group_count(width, group)
        scales = rng.uniform(0.01, 2, (ROWS, groups)).astype(scale_type)
        zero_points = rng.integers(low, high, (ROWS, groups)).astype(dtype)
        of_column = np.arange(width) // (width if group == PER_CHANNEL else group)
        centered = values.astype(np.float32)
        if asymmetric:
            centered = centered - zero_points[:, of_column]
        expected = centered * scales[:, of_column].astype(np.float32)
        inputs: list[Array | None] = [
            values if bits == 8 else pack_int4(values),
            scales[:, 0].copy() if group == PER_CHANNEL else scales,
            None,
        ]
        if asymmetric:
            stored = zero_points[:, 0].copy() if group == PER_CHANNEL else zero_points
            inputs[2] = stored if bits == 8 else pack_int4(stored)
        attributes = {"bits": bits, "signed": int(signed), "group": group}
        np.testing.assert_array_equal(read(inputs, width, attributes, 2, isa), expected[INDICES])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.format in NARROW and spec.scales], ids=str)
def test_narrow_numbers_match_their_dequantized_table(spec: Spec, isa: str) -> None:
    for width in WIDTHS:
        table = stored_weight(np.random.default_rng(width), (ROWS, width), spec)
        attributes = {"bits": 0, "signed": 1, "group": -1, **table.attributes}
        y = read(table.operands, width, attributes, 2, isa)
        np.testing.assert_array_equal(y, table.exact.astype(np.float32)[INDICES])


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_does_not_depend_on_the_others(isa: str) -> None:
    values = np.random.default_rng(0).integers(0, 256, (ROWS * 33 + 1) // 2).astype(np.uint8)
    scales = np.random.default_rng(1).uniform(0.5, 1, (ROWS, 3)).astype(np.float32)
    attributes = {"bits": 4, "signed": 1, "group": 16}
    together = np.zeros((ROWS, 33), np.float32)
    every = np.arange(ROWS, dtype=np.int64)
    run_operation("Embedding", [values, scales, None, every], [together], attributes, threads=2, isa=isa)
    for index in range(ROWS):
        alone = np.zeros((1, 33), np.float32)
        run_operation("Embedding", [values, scales, None, every[index : index + 1]], [alone], attributes, isa=isa)
        np.testing.assert_array_equal(alone[0], together[index])


@pytest.mark.parametrize("isa", ISAS)
def test_indices_outside_the_table_give_zeros(isa: str) -> None:
    y = np.full((5, 4), 9, np.float32)
    table = np.arange(4 * ROWS, dtype=np.float32).reshape(ROWS, 4)
    indices = np.array([-1, ROWS, 2, -ROWS - 1, -(2**63)], np.int64)
    run_operation("Embedding", [table, None, None, indices], [y], {}, isa=isa)
    np.testing.assert_array_equal(y[:, 0], [table[-1, 0], 0, table[2, 0], 0, 0])


def _zeros(*shape: int, dtype: Any = np.float32) -> Array:
    return np.zeros(shape, dtype)


FLOATS, BYTES, NIBBLES, SCALES = _zeros(4, 6), _zeros(4, 6, dtype=np.int8), _zeros(12, dtype=np.uint8), _zeros(4, 2)
T, Y = _zeros(3, dtype=np.int64), _zeros(3, 6)


@pytest.mark.parametrize(
    ("inputs", "y", "attributes", "message"),
    [
        ([None, None, None, T], Y, {}, "values"),
        ([FLOATS, None, None], Y, {}, "indices"),
        ([FLOATS, None, None, T, T], Y, {}, "5 inputs"),
        ([FLOATS, None, None, T], None, {}, "y is nothing"),
        ([FLOATS, None, None, T], _zeros(3, 5), {}, "values are"),
        ([FLOATS, None, None, T], _zeros(2, 6), {}, "one i64 for each row"),
        ([FLOATS, None, None, T.astype(np.int32)], Y, {}, "indices are i32"),
        ([FLOATS, None, None, _zeros(3, 1, dtype=np.int64)], Y, {}, "indices are"),
        ([FLOATS, SCALES, None, T], Y, {}, "scales or zero points"),
        ([FLOATS[:, :5], None, None, T], Y[:, :5], {}, "contiguous constant"),
        ([_zeros(4, 6, dtype=np.int64), None, None, T], Y, {}, "expected f32, f16"),
        ([BYTES, None, None, T], Y, {}, "without scales"),
        ([BYTES, SCALES, None, T], Y, {"group": 2}, "expected 3 a row"),
        ([BYTES, SCALES, None, T], Y, {"group": 0}, "group is 0"),
        ([BYTES, SCALES, None, T], Y, {"group": -(2**63)}, "group is -"),
        ([BYTES, _zeros(3, 2), None, T], Y, {}, "but scales are"),
        ([BYTES, SCALES.astype(np.int32), None, T], Y, {}, "scales are i32"),
        ([BYTES, _zeros(4, 2, 1), None, T], Y, {}, "rank 2"),
        ([BYTES, SCALES, _zeros(4, 2, dtype=np.uint8), T], Y, {}, "zero points are u8"),
        ([BYTES, SCALES, _zeros(2, 2, dtype=np.int8), T], Y, {}, "zero points are"),
        ([NIBBLES, SCALES, None, T], Y, {"bits": 3}, "of 3 bits"),
        ([NIBBLES, SCALES, None, T], Y, {"format": "int2"}, "format is int2"),
        ([NIBBLES, SCALES, None, T], Y, {"format": "int3", "group": 3}, "3-bit numbers"),
        ([NIBBLES, SCALES, _zeros(4, dtype=np.uint8), T], Y, {"format": "f4e2m1", "group": 3}, "have zero points"),
        ([NIBBLES[:11], SCALES, None, T], Y, {"bits": 4}, "packed into u8"),
        ([NIBBLES, _zeros(5, 2), None, T], Y, {"bits": 4}, "packed into u8"),
        ([NIBBLES, SCALES, _zeros(3, dtype=np.uint8), T], Y, {"bits": 4}, "zero points are"),
        ([NIBBLES, SCALES, _zeros(4, dtype=np.int8), T], Y, {"bits": 4}, "zero points are i8"),
    ],
)
def test_malformed_tables_are_refused(
    inputs: list[Array | None], y: Array | None, attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(_cpu.BlueprintError, match=message):
        run_operation("Embedding", inputs, [y], {"signed": 1, "group": 3} | attributes)


def test_packed_tables_say_how_they_are_packed() -> None:
    with pytest.raises(_cpu.BlueprintError, match="attribute is missing"):
        run_operation("Embedding", [NIBBLES, SCALES, None, T], [Y], {"group": 3})

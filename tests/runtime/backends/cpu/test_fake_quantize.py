"""Activations that a graph quantizes, as the CPU backend computes them, against the dialect's reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inferencex.formats.dialect.reference import quantize_rows
from inferencex.formats.dtypes import DataType
from inferencex.runtime.backends.cpu.native import _cpu
from tests.runtime.backends.cpu.operations import run_operation

Floats = NDArray[np.float32]
TO = {"i8": DataType.INT8, "f8e4m3": DataType.FLOAT8E4M3FN}


def _rows(rows: int, columns: int) -> Floats:
    """Return rows of all magnitudes, with zeros, exact halves of steps, and numbers far below the largest."""
    rng = np.random.default_rng(rows + columns)
    x = rng.standard_normal((rows, columns)) * 10.0 ** rng.uniform(-6, 6, (rows, 1))
    x *= 2.0 ** rng.integers(-20, 1, (rows, columns))
    x[rng.random((rows, columns)) < 0.1] = 0
    return x.astype(np.float32)


@pytest.mark.parametrize("to", TO)
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_with_their_own_scales(to: str, threads: int) -> None:
    for rows, columns in ((1, 1), (3, 7), (40, 100), (5, 2049)):
        x = _rows(rows, columns)
        values, scales = quantize_rows(x, TO[to])
        expected = values.astype(np.float32) * scales[:, None]
        wide = np.full((rows, columns + 3), 7, dtype=np.float32)
        apart = np.repeat(x, 2, axis=0)[::2]
        run_operation("FakeQuantize", [apart], [wide[:, :columns]], {"to": to}, threads=threads)
        np.testing.assert_array_equal(wide[:, :columns], expected)
        assert (wide[:, columns:] == 7).all()


@pytest.mark.parametrize("to", TO)
def test_one_scale_for_all(to: str) -> None:
    x = _rows(9, 200)
    x[0, 0], scale = np.nan, np.float32(0.37)
    scaled = x / scale
    limits = (-128, 127) if to == "i8" else (-448, 448)
    rounded = np.clip(scaled, *limits)
    rounded = np.rint(rounded) if to == "i8" else rounded.astype(TO[to].numpy()).astype(np.float32)
    y = np.zeros_like(x)
    run_operation("FakeQuantize", [x], [y], {"to": to, "static_scale": float(scale)})
    np.testing.assert_array_equal(y, rounded * scale)
    assert np.isnan(y[0, 0])


@pytest.mark.parametrize("to", TO)
def test_rows_without_a_scale(to: str) -> None:
    x = np.array([[0, 0], [2.0**-120, 0], [np.nan, 1], [-np.inf, 1], [1, 2]], dtype=np.float32)
    y = np.full_like(x, 7)
    run_operation("FakeQuantize", [x], [y], {"to": to})
    assert not y[:2].any() and np.isnan(y[2:4]).all() and y[4, 1] == 2


@pytest.mark.parametrize("isa", _cpu.available_isas())
def test_integers_with_one_scale_a_row(isa: str) -> None:
    """What integer linears read of a graph's dynamic quantization is what the graph says."""
    x = _rows(12, 333)
    values, scales = quantize_rows(x, DataType.INT8)
    blocks, row_bytes = _cpu.block_layout(333, 333, True)
    assert blocks == 1
    shapes = ((12, row_bytes), np.int8), ((12, 1), np.float32), ((12, 1), np.int32)
    outputs: list[Any] = [np.zeros(shape, dtype) for shape, dtype in shapes]
    run_operation("Quantize", [x], outputs, {"whole": 1}, isa=isa)
    np.testing.assert_array_equal(outputs[0][:, :333], values)
    np.testing.assert_array_equal(outputs[1][:, 0], scales)
    np.testing.assert_array_equal(outputs[2][:, 0], values.sum(1, dtype=np.int32))


@pytest.mark.parametrize(
    ("attributes", "width", "message"),
    [
        ({}, 6, "attribute is missing"),
        ({"to": "i4"}, 6, "attribute to is i4"),
        ({"to": "i8", "static_scale": 0.0}, 6, "expected a positive number"),
        ({"to": "i8", "static_scale": -1.0}, 6, "expected a positive number"),
        ({"to": "i8", "static_scale": float("inf")}, 6, "not finite"),
        ({"to": "i8"}, 5, "y is"),
    ],
)
def test_hostile_blueprints(attributes: dict[str, Any], width: int, message: str) -> None:
    x, y = np.zeros((4, 6), np.float32), np.zeros((4, width), np.float32)
    with pytest.raises(_cpu.BlueprintError, match=message):
        run_operation("FakeQuantize", [x], [y], attributes)

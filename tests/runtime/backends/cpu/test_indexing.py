from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inferencex.runtime.backends.cpu.native import _cpu
from tests.runtime.backends.cpu.layouts import LAYOUTS, laid_out, onnx_outputs, run
from tests.runtime.backends.cpu.operations import run_operation

Array = NDArray[Any]

F = np.float32
FAR = [-(1 << 63), (1 << 63) - 1, 1 << 40, -(1 << 40)]


def _random(*shape: int, dtype: str = "f4", seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(-99, 99, shape).astype(dtype)


def _indices(*shape: int, size: int, dtype: str = "i8", seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(-size, size, shape).astype(dtype)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_gather_along_any_axis(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    axis = data.draw(st.integers(0, len(shape) - 1))
    where = data.draw(st.lists(st.integers(0, 4), max_size=3))
    x = laid_out(_random(*shape, dtype=data.draw(st.sampled_from(["f4", "f2", "i8", "u1", "?"]))), "transposed")
    indices = _indices(*where, size=shape[axis], dtype=data.draw(st.sampled_from(["i8", "i4"])))
    expected = np.take(x, indices, axis)
    indices = laid_out(indices, data.draw(st.sampled_from(LAYOUTS)))
    layout = data.draw(st.sampled_from(LAYOUTS))
    (y,) = run("Gather", [x, indices], [(expected.shape, x.dtype)], {"axis": axis}, layout)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_large_gathers(axis: int, layout: str) -> None:
    x = _random(20, 30, 40)
    indices = _indices(70, size=x.shape[axis])
    expected = np.take(x, indices, axis)
    (y,) = run("Gather", [laid_out(x, layout), indices], [(expected.shape, "f4")], {"axis": axis})
    np.testing.assert_array_equal(y, expected)


def test_what_an_index_out_of_range_picks_is_zero() -> None:
    x = np.arange(1, 13, dtype=F).reshape(3, 4)
    far = np.array([1, 3, -4, *FAR, -1])
    expected = np.zeros((8, 4), F)
    expected[0], expected[-1] = x[1], x[2]
    np.testing.assert_array_equal(run("Gather", [x, far], [((8, 4), "f4")], {"axis": 0})[0], expected)
    np.testing.assert_array_equal(run("Gather", [x.T, far], [((4, 8), "f4")], {"axis": 1})[0], expected.T)
    tall = np.repeat(far[:, None], 4, 1)
    np.testing.assert_array_equal(run("GatherElements", [x, tall], [((8, 4), "f4")], {"axis": 0})[0], expected)
    np.testing.assert_array_equal(run("GatherND", [x, far[:, None]], [((8, 4), "f4")])[0], expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["f4", "f2", "i8", "i4", "i1", "?"])
@pytest.mark.parametrize("axis", [0, 1])
def test_gather_elements(axis: int, dtype: str, layout: str) -> None:
    x = _random(50, 60, dtype=dtype)
    indices = _indices(*((70, 33) if axis == 0 else (45, 70)), size=x.shape[axis])
    clipped = x[:, :33] if axis == 0 else x[:45]
    expected = np.take_along_axis(clipped, indices, axis)
    inputs = [laid_out(x, layout), laid_out(indices, layout)]
    (y,) = run("GatherElements", inputs, [(expected.shape, dtype)], {"axis": axis})
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(("batch", "depth"), [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (2, 1)])
def test_gather_nd(batch: int, depth: int) -> None:
    x = _random(3, 4, 5)
    leading = (3, 4)[:batch]
    indices = np.stack([_indices(*leading, 90, size=x.shape[batch + k], seed=k) for k in range(depth)], -1)
    (expected,) = onnx_outputs("GatherND", [x, indices], {"batch_dims": batch})
    for layout in LAYOUTS:
        (y,) = run("GatherND", [laid_out(x, layout), indices], [(expected.shape, "f4")], {"batch_dims": batch})
        np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", ["f4", "i8", "i4"])
@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
def test_scatter_elements(reduction: str, dtype: str, axis: int, layout: str) -> None:
    x = _random(40, 50, dtype=dtype)
    shape = (45, 30) if axis == 0 else (30, 45)
    indices, updates = _indices(*shape, size=x.shape[axis]), _random(*shape, dtype=dtype, seed=2)
    combine = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}.get(reduction)
    expected = x.copy()
    for place in np.ndindex(*shape):
        target = (indices[place], place[1]) if axis == 0 else (place[0], indices[place])
        expected[target] = combine(expected[target], updates[place]) if combine else updates[place]
    inputs = [laid_out(a, layout) for a in (x, indices, updates)]
    attributes = {"axis": axis, "reduction": reduction}
    (y,) = run("ScatterElements", inputs, [(x.shape, dtype)], attributes)
    np.testing.assert_array_equal(y, expected)
    run_operation("ScatterElements", [x, *inputs[1:]], [x], attributes, threads=3)
    np.testing.assert_array_equal(x, expected)


def test_scatter_ignores_indices_out_of_range() -> None:
    x, indices = np.ones((2, 3), F), np.array([[0, 3, -4, *FAR], [-1, 2, 5, *FAR]])
    updates = np.arange(14, dtype=F).reshape(2, 7)
    (y,) = run("ScatterElements", [x, indices, updates], [(x.shape, "f4")], {"axis": 1})
    np.testing.assert_array_equal(y, [[0, 1, 1], [1, 1, 8]])
    (y,) = run("ScatterElements", [x > 2, indices, updates > 7], [(x.shape, "?")], {"axis": 1})
    np.testing.assert_array_equal(y, [[False, False, False], [False, False, True]])


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["f4", "i8", "?"])
def test_one_hot(dtype: str, axis: int) -> None:
    indices = _indices(30, 20, size=9)
    indices[3, 4], indices[5, 6] = 9, -10
    values = np.array([0, 1]).astype(dtype)
    wrapped = np.where(indices < 0, indices + 9, indices)
    expected = np.moveaxis(np.where(wrapped[..., None] == np.arange(9), values[1], values[0]), -1, axis)
    for layout in LAYOUTS:
        inputs = [laid_out(indices, layout), None, values]
        (y,) = run("OneHot", inputs, [(expected.shape, dtype)], {"axis": axis})
        np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(("dtype", "start", "delta"), [("f4", 0.5, 0.25), ("i8", -3, 7), ("i4", (1 << 31) - 5, 1)])
def test_range(dtype: str, start: float, delta: float) -> None:
    scalars = [np.array(start, dtype), None, np.array(delta, dtype)]
    (y,) = run("Range", scalars, [((3000,), dtype)])
    np.testing.assert_array_equal(y, (start + np.arange(3000) * delta).astype(dtype))


@pytest.mark.parametrize(
    ("kind", "inputs", "output", "attributes", "message"),
    [
        ("Gather", [np.zeros((2, 3), F), np.zeros(4, F)], np.zeros((4, 3), F), {"axis": 0}, "the indices is f32"),
        ("Gather", [np.zeros((2, 3), F), np.zeros(4, "i8")], np.zeros((4, 2), F), {"axis": 0}, "expected the shape"),
        ("Gather", [np.zeros((2, 3), F), np.zeros(4, "i8")], np.zeros((4, 3), F), {"axis": 2}, "expected a dimension"),
        ("Gather", [np.zeros((1,) * 4, F), np.zeros((1,) * 4, "i8")], np.zeros(1, F), {"axis": 0}, "more than 6"),
        ("GatherElements", [np.zeros((2, 3), F), np.zeros((3, 3), "i8")], np.zeros((3, 3), F), {"axis": 1}, "exceed"),
        ("GatherElements", [np.zeros(3, F), np.zeros((1, 3), "i8")], np.zeros((1, 3), F), {"axis": 0}, "exceed"),
        ("GatherND", [np.zeros(3, F), np.zeros((4, 2), "i8")], np.zeros(4, F), {}, "do not fit"),
        ("GatherND", [np.zeros(3, F), np.array(0)], np.zeros(4, F), {}, "tuples of a fixed size"),
        ("GatherND", [np.zeros((3, 2), F), np.zeros((4, 1), "i8")], np.zeros(4, F), {"batch_dims": 1}, "batch dim"),
        ("ScatterElements", [np.zeros(3, F), np.zeros(2, "i8"), np.zeros(3, F)], np.zeros(3, F), {"axis": 0}, "update"),
        ("ScatterElements", [np.zeros(3, F), np.zeros(2, "i8"), np.zeros(2, F)], np.zeros(3, F),
         {"axis": 0, "reduction": "sum"}, "none, add, mul, max or min"),
        ("OneHot", [np.zeros(3, "i8"), None, np.zeros(3, F)], np.zeros((3, 2), F), {"axis": 1}, "two of them"),
        ("OneHot", [np.zeros(3, "i8"), np.zeros(2, F)], np.zeros((3, 2), F), {"axis": 1}, "expected the inputs"),
        ("Range", [np.zeros((), F), None, np.zeros(2, F)], np.zeros(3, F), {}, "single element"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    kind: str, inputs: list[Array | None], output: Array, attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(_cpu.BlueprintError, match=message):
        run_operation(kind, inputs, [output], attributes)


def test_indices_must_stay_within_whatever_size_a_step_has() -> None:
    program = _cpu.Program(1)

    def operand(dtype: str, *size: tuple[int, int]) -> _cpu.Operand:
        return _cpu.operand(dtype, list(size), [(0, 0)] * len(size), 0)

    x = operand("f32", (1, 1), (4, 0))
    for leading, fits in (((1, 1), True), ((1, 2), False), ((1, 0), False), ((2, 1), False)):
        indices, y = operand("i64", leading, (2, 0)), operand("f32", leading, (2, 0))
        if fits:
            program.add("GatherElements", "fits", [x, indices], [y], {"axis": 1})
        else:
            with pytest.raises(_cpu.BlueprintError, match="exceed"):
                program.add("GatherElements", "exceeds", [x, indices], [y], {"axis": 1})

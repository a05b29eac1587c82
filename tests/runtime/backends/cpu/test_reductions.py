from __future__ import annotations

from collections.abc import Callable
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
WIDE: dict[str, Callable[..., Array]] = {
    "ReduceSum": np.sum, "ReduceMean": np.mean, "ReduceMax": np.max, "ReduceMin": np.min, "ReduceProd": np.prod,
    "ReduceSumSquare": lambda x, axis, keepdims: np.sum(x * x, axis, keepdims=keepdims),
    "ReduceL1": lambda x, axis, keepdims: np.sum(np.abs(x), axis, keepdims=keepdims),
    "ReduceL2": lambda x, axis, keepdims: np.sqrt(np.sum(x * x, axis, keepdims=keepdims)),
}  # fmt: skip
OF_INTEGERS = ["ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSumSquare"]


def _floats(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).uniform(0.5, 1.5, shape).astype(F)


def _integers(*shape: int, dtype: str = "i8", low: int = -4, high: int = 5) -> Array:
    return np.random.default_rng(0).integers(low, high, shape).astype(dtype)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_dimensions_are_reduced(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(list(WIDE)))
    shape = data.draw(st.lists(st.integers(1, 5), max_size=6))
    axes = tuple(sorted(data.draw(st.sets(st.integers(0, len(shape) - 1))))) if shape else ()
    keepdims = data.draw(st.booleans())
    x = laid_out(_floats(*shape), data.draw(st.sampled_from(LAYOUTS)))
    expected = np.asarray(WIDE[kind](x.astype(np.float64), axis=axes, keepdims=keepdims))
    layout = data.draw(st.sampled_from(LAYOUTS))
    (y,) = run(kind, [x], [(expected.shape, "f4")], {"axes": list(axes)}, layout)
    np.testing.assert_allclose(y, expected, rtol=1e-4)


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("kind", sorted(set(WIDE) - {"ReduceProd"}))
def test_large_reductions(kind: str, axes: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).standard_normal((30, 40, 70)).astype(F)
    expected = WIDE[kind](x.astype(np.float64), axis=axes, keepdims=False)
    for layout in LAYOUTS:
        (y,) = run(kind, [laid_out(x, layout)], [(expected.shape, "f4")], {"axes": list(axes)})
        np.testing.assert_allclose(y, expected, rtol=2e-6, atol=2e-4 if kind == "ReduceSum" else 1e-6)


@pytest.mark.parametrize("dtype", ["i8", "i4"])
@pytest.mark.parametrize("kind", OF_INTEGERS)
def test_reductions_of_integers_are_exact(kind: str, dtype: str) -> None:
    x = _integers(20, 30, 40, dtype=dtype)
    for axes in ((1,), (2,), (0, 1)):
        with np.errstate(over="ignore"):
            expected = WIDE[kind](x, axis=axes, keepdims=True).astype(dtype)
        (y,) = run(kind, [x], [(expected.shape, dtype)], {"axes": list(axes)})
        np.testing.assert_array_equal(y, expected)


def test_reductions_of_nothing_and_of_nan() -> None:
    nothing = np.zeros((3, 0), F)
    for kind, expected in (("ReduceSum", 0.0), ("ReduceProd", 1.0), ("ReduceMax", -np.inf), ("ReduceMin", np.inf)):
        np.testing.assert_array_equal(run(kind, [nothing], [((3,), "f4")], {"axes": [1]})[0], [expected] * 3)
    assert np.all(np.isnan(run("ReduceMean", [nothing], [((3,), "f4")], {"axes": [1]})[0]))
    x = np.array([[1, np.nan, 3], [-np.inf, 1, np.inf]], F)
    np.testing.assert_array_equal(run("ReduceMax", [x], [((2,), "f4")], {"axes": [1]})[0], [np.nan, np.inf])
    np.testing.assert_array_equal(run("ReduceMin", [x], [((3,), "f4")], {"axes": [0]})[0], [-np.inf, np.nan, 3])


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("kind", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("dtype", ["f4", "i8", "i4"])
def test_positions_of_extremes(dtype: str, kind: str, last: int) -> None:
    x = _integers(20, 30, 40, dtype=dtype)  # many ties
    for axis in (0, 1, 2):
        attributes = {"axis": axis, "keepdims": 1, "select_last_index": last}
        (expected,) = onnx_outputs(kind, [x], attributes)
        for layout in LAYOUTS:
            (y,) = run(kind, [laid_out(x, layout)], [(expected.shape, "i8")], attributes)
            np.testing.assert_array_equal(y, expected)
            (y,) = run(kind, [laid_out(x, layout)], [(expected.squeeze(axis).shape, "i8")], attributes)
            np.testing.assert_array_equal(y, expected.squeeze(axis))


def test_nan_is_the_extreme_of_a_line() -> None:
    x = np.array([[1, np.nan, 3, np.nan], [4, np.inf, np.inf, -np.inf]], F)
    for kind, function in (("ArgMax", np.argmax), ("ArgMin", np.argmin)):
        np.testing.assert_array_equal(run(kind, [x], [((2,), "i8")], {"axis": 1})[0], function(x, 1))
    (y,) = run("ArgMax", [x], [((2,), "i8")], {"axis": 1, "select_last_index": 1})
    np.testing.assert_array_equal(y, [3, 2])


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("kind", ["Softmax", "LogSoftmax"])
@np.errstate(divide="ignore")
def test_softmax(kind: str, axis: int) -> None:
    x = (np.random.default_rng(0).standard_normal((9, 33, 20)) * 20).astype(F)
    x[0, 0, 0] = -np.inf
    (expected,) = onnx_outputs(kind, [x.astype(np.float64)], {"axis": axis})
    tolerance = 1e-37 if kind == "Softmax" else 5e-7
    for layout in LAYOUTS:
        (y,) = run(kind, [laid_out(x, layout)], [(x.shape, "f4")], {"axis": axis})
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=tolerance)
    shared = x.copy()
    run_operation(kind, [shared], [shared], {"axis": axis}, threads=3)
    np.testing.assert_allclose(shared, expected, rtol=1e-5, atol=tolerance)


def test_softmax_of_nothing_finite_is_nan() -> None:
    x = np.array([[-np.inf, -np.inf], [np.nan, 0], [0, np.inf], [0, -np.inf]], F)
    (y,) = run("Softmax", [x], [(x.shape, "f4")], {"axis": 1})
    np.testing.assert_array_equal(y, [[np.nan] * 2, [np.nan] * 2, [np.nan] * 2, [1, 0]])


@pytest.mark.parametrize(("exclusive", "reverse"), [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("dtype", ["f4", "i8", "i4"])
def test_running_sums(dtype: str, exclusive: int, reverse: int) -> None:
    x = _integers(7, 31, 12, dtype=dtype)
    for axis in (0, 1, 2):
        attributes = {"exclusive": exclusive, "reverse": reverse}
        (expected,) = onnx_outputs("CumSum", [x, np.array(axis)], attributes)
        for layout in LAYOUTS:
            (y,) = run("CumSum", [laid_out(x, layout)], [(x.shape, dtype)], {**attributes, "axis": axis})
            np.testing.assert_array_equal(y, expected)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_the_first_in_any_order(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 40))
    k = data.draw(st.integers(0, length))
    largest = data.draw(st.booleans())
    dtype = data.draw(st.sampled_from(["f4", "i8", "i4"]))
    lines = data.draw(st.lists(st.lists(st.integers(-6, 6), min_size=length, max_size=length), min_size=1, max_size=4))
    x = np.array(lines, dtype)
    indices = np.argsort(-x if largest else x, axis=1, kind="stable")[:, :k]
    values = np.take_along_axis(x, indices, 1)
    for axis in (1, 0):
        turned, first, where = (x, values, indices) if axis == 1 else (x.T, values.T, indices.T)
        attributes = {"axis": axis, "largest": int(largest), "sorted": 0}
        inputs = [laid_out(turned, data.draw(st.sampled_from(LAYOUTS)))]
        specs = [(first.shape, dtype), (first.shape, "i8")]
        found, found_indices = run("TopK", inputs, specs, attributes, data.draw(st.sampled_from(LAYOUTS)))
        np.testing.assert_array_equal(found, first)
        np.testing.assert_array_equal(found_indices, where)


@pytest.mark.parametrize("k", [1, 2, 8, 150, 300])
def test_the_first_of_long_lines(k: int) -> None:
    x = np.random.default_rng(0).integers(0, 200, (17, 300)).astype(F)
    values, indices = run("TopK", [x], [((17, k), "f4"), ((17, k), "i8")], {"axis": 1})
    expected = np.argsort(-x, 1, kind="stable")[:, :k]
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(x, expected, 1))


def test_nan_counts_as_the_largest() -> None:
    x = np.array([[1, np.nan, np.inf, np.nan, -np.inf]], F)
    specs = [((1, 5), "f4"), ((1, 5), "i8")]
    np.testing.assert_array_equal(run("TopK", [x], specs, {"axis": 1})[1], [[1, 3, 2, 0, 4]])
    np.testing.assert_array_equal(run("TopK", [x], specs, {"axis": 1, "largest": 0})[1], [[4, 0, 2, 1, 3]])


@pytest.mark.parametrize(
    ("kind", "shape", "attributes"),
    [
        ("ReduceSum", (), {"axes": [1]}),
        ("ReduceMean", (1,), {"axes": [1]}),
        ("ReduceSum", (65,), {"axes": [1]}),
        ("Softmax", (3, 65), {"axis": 2}),
        ("Softmax", (3, 65), {"axis": 1}),
        ("LogSoftmax", (3, 65), {"axis": 2}),
    ],
)
def test_a_row_does_not_depend_on_the_others(kind: str, shape: tuple[int, ...], attributes: dict[str, Any]) -> None:
    x = _floats(33, 3, 65) if len(shape) != 0 else _floats(33, 129)
    tail = shape if kind in ("Softmax", "LogSoftmax") else tuple(d for i, d in enumerate(x.shape[1:]) if i != 0)
    (whole,) = run(kind, [x], [((33, *tail), "f4")], attributes)
    for row in (0, 7, 32):
        (alone,) = run(kind, [x[row : row + 1]], [((1, *tail), "f4")], attributes)
        assert alone.tobytes() == whole[row].tobytes()


@pytest.mark.parametrize(
    ("kind", "inputs", "outputs", "attributes", "message"),
    [
        ("ReduceSum", [np.zeros((2, 3), F)], [np.zeros(2, F)], {}, "'axes' is missing"),
        ("ReduceSum", [np.zeros((2, 3), F)], [np.zeros(2, F)], {"axes": 1}, "not a list"),
        ("ReduceSum", [np.zeros((2, 3), F)], [np.zeros(2, F)], {"axes": [2]}, "no dimension"),
        ("ReduceSum", [np.zeros((2, 3), F)], [np.zeros(2, F)], {"axes": [-1]}, "no dimension"),
        ("ReduceSum", [np.zeros((2, 3), F)], [np.zeros(2, F)], {"axes": [1, 1]}, "named twice"),
        ("ReduceSum", [np.zeros((2, 3), F)], [np.zeros(3, F)], {"axes": [1]}, "not what is left"),
        ("ReduceSum", [np.zeros((2, 3), F)], [np.zeros((2, 3), F)], {"axes": [1]}, "not what is left"),
        ("ReduceMean", [np.zeros((2, 3), "i8")], [np.zeros(2, "i8")], {"axes": [1]}, "does not take"),
        ("ArgMax", [np.zeros((2, 3), F)], [np.zeros(2, F)], {"axis": 1}, "of the types i64"),
        ("ArgMax", [np.zeros((), F)], [np.zeros((), "i8")], {"axis": 0}, "expected a dimension"),
        ("Softmax", [np.zeros(3, F)], [np.zeros(3, F)], {"axis": 1}, "expected a dimension"),
        ("Softmax", [np.zeros(3, F)], [np.zeros(4, F)], {"axis": 0}, "expected the shape"),
        ("CumSum", [np.zeros(3, "?")], [np.zeros(3, "?")], {"axis": 0}, "expected one of the types"),
        ("TopK", [np.zeros(3, F)], [np.zeros(4, F), np.zeros(4, "i8")], {"axis": 0}, "more than there are"),
        ("TopK", [np.zeros(3, F)], [np.zeros(2, F), np.zeros(3, "i8")], {"axis": 0}, "expected the shape"),
        ("TopK", [np.zeros(3, F)], [np.zeros(2, F)], {"axis": 0}, "1 outputs, expected 2"),
    ],
)
def test_what_does_not_fit_is_refused(
    kind: str, inputs: list[Array | None], outputs: list[Array | None], attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(_cpu.BlueprintError, match=message):
        run_operation(kind, inputs, outputs, attributes)

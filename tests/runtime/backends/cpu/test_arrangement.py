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

TYPES = ["f4", "f2", "i8", "i4", "i1", "u1", "?"]
F = np.float32


def _random(*shape: int, dtype: str = "f4", seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(-99, 99, shape).astype(dtype)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_copies_of_any_view(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 5), max_size=6))
    x = laid_out(_random(*shape, dtype=data.draw(st.sampled_from(TYPES))), data.draw(st.sampled_from(LAYOUTS)))
    x = x.transpose(data.draw(st.permutations(range(x.ndim))))
    x = np.broadcast_to(x, (*data.draw(st.lists(st.integers(1, 3), max_size=6 - x.ndim)), *x.shape))
    (y,) = run("Copy", [x], [(x.shape, x.dtype)], output_layout=data.draw(st.sampled_from(LAYOUTS)))
    np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("dtype", TYPES)
def test_large_copies_are_shared_among_threads(dtype: str) -> None:
    x = _random(4, 50, 33, dtype=dtype)
    for view in (x, x.transpose(1, 0, 2), x.T, x[:, :1], x[..., 3:20]):
        shape = (4, 50, 33) if view.shape == (4, 1, 33) else view.shape
        (y,) = run("Copy", [view], [(shape, dtype)])
        np.testing.assert_array_equal(y, np.broadcast_to(view, shape))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("dtype", TYPES)
def test_concat(dtype: str, axis: int, layout: str) -> None:
    shapes = [[6, 20, 24] for _ in range(3)]
    for shape, size in zip(shapes, (7, 0, 2), strict=True):
        shape[axis] = size
    parts = [laid_out(_random(*shape, dtype=dtype, seed=i), layout) for i, shape in enumerate(shapes)]
    expected = np.concatenate(parts, axis)
    for output_layout in ("contiguous", "padded"):
        (y,) = run("Concat", parts, [(expected.shape, dtype)], {"axis": axis}, output_layout)
        np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("repeats", [(1, 2, 1, 1), (4, 1, 3, 2), (1, 1, 1, 1), (2, 0, 1, 1)])
def test_tile(repeats: tuple[int, ...]) -> None:
    for layout in LAYOUTS:
        x = laid_out(_random(1, 3, 40, 16), layout)
        expected = np.tile(x, repeats)
        np.testing.assert_array_equal(run("Tile", [x], [(expected.shape, "f4")])[0], expected)


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        ("f4", -np.inf, -np.inf), ("f4", 1, 1.0), ("i8", (1 << 62) + 1, (1 << 62) + 1), ("i8", 1e30, (1 << 63) - 1),
        ("i4", -7.0, -7), ("i1", 300, 127), ("u1", -4, 0), ("?", 2, True), ("?", 0, False),
    ],
)  # fmt: skip
def test_fill(dtype: str, value: float, expected: float) -> None:
    for layout in LAYOUTS:
        (y,) = run("Fill", [], [((40, 33), dtype)], {"value": value}, layout)
        np.testing.assert_array_equal(y, np.full((40, 33), expected, dtype))
    assert run("Fill", [], [((), "f4")])[0] == 0


@pytest.mark.parametrize("dtype", ["f4", "i8", "i4", "?"])
@pytest.mark.parametrize("pads", [[0, 0, 0, 0, 0, 0], [1, 2, 3, 0, 1, 2], [0, 0, 5, 0, 0, 0], [2, 0, 0, 2, 0, 0]])
def test_pad(pads: list[int], dtype: str) -> None:
    x = _random(4, 20, 16, dtype=dtype)
    value = np.array(-3.0).astype(dtype)
    (expected,) = onnx_outputs("Pad", [x, np.array(pads), value], {})
    for layout in LAYOUTS:
        (y,) = run("Pad", [laid_out(x, layout)], [(expected.shape, dtype)], {"pads": pads, "value": -3.0})
        np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("upper", [0, 1])
@pytest.mark.parametrize("k", [0, 1, -3, 40, -40, 1 << 62, -(1 << 62)])
def test_triangles(k: int, upper: int) -> None:
    x = _random(3, 24, 17)
    expected = (np.triu if upper else np.tril)(x, int(np.clip(k, -99, 99)))
    for layout in LAYOUTS:
        (y,) = run("Trilu", [laid_out(x, layout)], [(x.shape, "f4")], {"k": k, "upper": upper})
        np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(
    ("kind", "inputs", "output", "attributes", "message"),
    [
        ("Copy", [np.zeros(3, F)], np.zeros(3, "i8"), {}, "expected the type f32"),
        ("Copy", [np.zeros((2, 3), F)], np.zeros(3, F), {}, "does not broadcast"),
        ("Concat", [np.zeros(3, F)], np.zeros(3, F), {}, "'axis' is missing"),
        ("Concat", [np.zeros(3, F)], np.zeros(3, F), {"axis": -1}, "expected a dimension"),
        ("Concat", [np.zeros(3, F)], np.zeros(3, F), {"axis": 1}, "expected a dimension"),
        ("Concat", [np.zeros(3, F)], np.zeros(4, F), {"axis": 0}, "do not add up"),
        ("Concat", [np.zeros((3, 1), F), np.zeros((2, 1), F)], np.zeros((3, 2), F), {"axis": 1}, "expected the shape"),
        ("Concat", [], np.zeros(3, F), {"axis": 0}, "0 inputs"),
        ("Tile", [np.zeros(3, F)], np.zeros(4, F), {}, "not a multiple"),
        ("Tile", [np.zeros(3, F)], np.zeros((2, 3), F), {}, "not a multiple"),
        ("Fill", [], np.zeros(3, "f2"), {}, "no filling with the type f16"),
        ("Fill", [], np.zeros(3, F), {"value": "x"}, "is not a number"),
        ("Pad", [np.zeros(3, F)], np.zeros(5, F), {"pads": [1]}, "two a dimension"),
        ("Pad", [np.zeros(3, F)], np.zeros(2, F), {"pads": [-1, 0]}, "negative"),
        ("Pad", [np.zeros(3, F)], np.zeros(4, F), {"pads": [1, 1]}, "expected the shape"),
        ("Pad", [np.zeros(3, F)], np.zeros(5, F), {"pads": [1, 1], "mode": "edge"}, "expected 'constant'"),
        ("Trilu", [np.zeros(3, F)], np.zeros(3, F), {}, "expected matrices"),
    ],
)
def test_what_does_not_fit_is_refused(
    kind: str, inputs: list[Array | None], output: Array, attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(_cpu.BlueprintError, match=message):
        run_operation(kind, inputs, [output], attributes)


def test_sizes_that_depend_on_the_step() -> None:
    program = _cpu.Program(1)

    def operand(*size: tuple[int, int]) -> _cpu.Operand:
        return _cpu.operand("f32", list(size), [(0, 0)] * len(size), 0)

    tokens, twice, fixed = operand((1, 1)), operand((2, 1)), operand((3, 0))
    program.add("Concat", "two lots of tokens", [tokens, tokens], [twice], {"axis": 0})
    program.add("Tile", "two lots of tokens", [tokens], [twice], {})
    program.add("Tile", "a constant", [fixed], [operand((6, 1))], {})
    with pytest.raises(_cpu.BlueprintError, match="fixed and of varying size"):
        program.add("Concat", "mixed", [tokens, fixed], [twice], {"axis": 0})
    with pytest.raises(_cpu.BlueprintError, match="not a multiple"):
        program.add("Tile", "backwards", [twice], [tokens], {})
    with pytest.raises(_cpu.BlueprintError, match="varying size would be padded"):
        program.add("Pad", "padded", [tokens], [tokens], {"pads": [1, 0]})

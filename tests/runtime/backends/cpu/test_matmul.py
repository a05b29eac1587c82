from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inferencex.runtime.backends.cpu.native import _cpu
from tests.runtime.backends.cpu.layouts import LAYOUTS, laid_out, run
from tests.runtime.backends.cpu.operations import run_operation

Array = NDArray[Any]

F = np.float32


def _floats(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(F)


def _check(a: Array, b: Array, layout: str = "contiguous") -> None:
    expected = np.matmul(a.astype(np.float64), b.astype(np.float64))
    (y,) = run("MatMul", [a, b], [(expected.shape, "f4")], output_layout=layout)
    bound = np.matmul(np.abs(a).astype(np.float64), np.abs(b).astype(np.float64)) * 1e-6
    assert np.all(np.abs(y - expected) <= bound + 1e-30)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_batches_broadcast_and_operands_lie_anyhow(data: st.DataObject) -> None:
    rows, depth, columns = (data.draw(st.integers(0, 9)) for _ in range(3))
    batch = data.draw(st.lists(st.integers(1, 3), max_size=4))
    operands = []
    for seed, matrix in enumerate([(rows, depth), (depth, columns)]):
        rank = data.draw(st.integers(0, len(batch)))
        ones = data.draw(st.lists(st.booleans(), min_size=rank, max_size=rank))
        own = [1 if one else size for one, size in zip(ones, batch[len(batch) - rank :], strict=True)]
        operands.append(laid_out(_floats(*own, *matrix, seed=seed), data.draw(st.sampled_from(LAYOUTS))))
    _check(operands[0], operands[1], data.draw(st.sampled_from(LAYOUTS)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 33, 130])
@pytest.mark.parametrize(("depth", "columns"), [(24, 112), (64, 31), (200, 64), (4, 4)])
def test_shapes_of_tiles(rows: int, depth: int, columns: int, layout: str) -> None:
    _check(laid_out(_floats(2, rows, depth), layout), laid_out(_floats(depth, columns, seed=1), layout))


@pytest.mark.parametrize(
    ("a", "b"), [((5,), (5,)), ((5,), (5, 7)), ((3, 5), (5,)), ((2, 3, 5), (5,)), ((5,), (4, 5, 7))]
)
def test_vectors(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    _check(_floats(*a), _floats(*b, seed=1))


@pytest.mark.parametrize("transposed", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("c", [None, (), (70,), (40, 1), (40, 70)], ids=str)
def test_gemm(c: tuple[int, ...] | None, transposed: tuple[int, int]) -> None:
    a, b = _floats(40, 50), _floats(50, 70, seed=1)
    bias = None if c is None else _floats(*c, seed=2)
    attributes = {"transA": transposed[0], "transB": transposed[1], "alpha": 0.5, "beta": -2.0}
    expected = 0.5 * (a.astype(np.float64) @ b) - 2.0 * (0.0 if bias is None else bias)
    inputs = [
        np.ascontiguousarray(a.T) if transposed[0] else a,
        np.ascontiguousarray(b.T) if transposed[1] else b,
        bias,
    ]
    (y,) = run("Gemm", inputs, [(expected.shape, "f4")], attributes)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("turned", [False, True])
def test_a_row_does_not_depend_on_the_others(turned: bool) -> None:
    a, b = _floats(133, 150), _floats(150, 75, seed=1)
    b = laid_out(b, "transposed") if turned else b
    (whole,) = run("MatMul", [a, b], [((133, 75), "f4")])
    for row in (0, 66, 131, 132):
        (alone,) = run("MatMul", [a[row : row + 1], b], [((1, 75), "f4")])
        assert alone.tobytes() == whole[row].tobytes()
    (some,) = run("MatMul", [a[60:67], b], [((7, 75), "f4")])
    assert some.tobytes() == whole[60:67].tobytes()


def test_infinities_stay_in_their_column() -> None:
    a, b = np.ones((5, 3), F), np.zeros((3, 40), F)
    b[1, 33] = np.inf
    (y,) = run("MatMul", [a, b], [((5, 40), "f4")])
    assert np.all(np.isinf(y[:, 33]))
    assert np.all(np.delete(y, 33, 1) == 0)


@pytest.mark.parametrize(
    ("kind", "inputs", "output", "attributes", "message"),
    [
        ("MatMul", [np.zeros((2, 3), F), np.zeros((4, 5), F)], np.zeros((2, 5), F), {}, "do not fit"),
        ("MatMul", [np.zeros((2, 3), F), np.zeros((3, 5), F)], np.zeros((5, 2), F), {}, "do not fit"),
        ("MatMul", [np.zeros((2, 3), F), np.zeros((3, 5), F)], np.zeros((1, 2, 5), F), {}, "ranks that do not fit"),
        ("MatMul", [np.zeros((2, 2, 3), F), np.zeros((3, 3, 5), F)], np.zeros((2, 2, 5), F), {}, "do not fit"),
        ("MatMul", [np.zeros((), F), np.zeros((3, 5), F)], np.zeros(5, F), {}, "expected matrices"),
        ("MatMul", [np.zeros((2, 3), "i8"), np.zeros((3, 5), "i8")], np.zeros((2, 5), "i8"), {}, "of the types f32"),
        ("Gemm", [np.zeros(3, F), np.zeros((3, 5), F)], np.zeros(5, F), {}, "expected matrices"),
        ("Gemm", [np.zeros((2, 3), F), np.zeros((3, 5), F)], np.zeros((2, 5), F), {"transB": 1}, "do not fit"),
        ("Gemm", [np.zeros((2, 3), F), np.zeros((3, 5), F), np.zeros(2, F)], np.zeros((2, 5), F), {}, "broadcast"),
        ("Gemm", [np.zeros((2, 3), F), np.zeros((3, 5), F)], np.zeros((2, 5), F), {"transA": 1.0}, "not an integer"),
    ],
)
def test_what_does_not_fit_is_refused(
    kind: str, inputs: list[Array | None], output: Array, attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(_cpu.BlueprintError, match=message):
        run_operation(kind, inputs, [output], attributes)

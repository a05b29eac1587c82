"""Rotary embeddings of the CPU backend against numpy in float64."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inferencex.runtime.backends.cpu.native import _cpu
from tests.runtime.backends.cpu.operations import run_operation

Array = NDArray[Any]

ISAS = _cpu.available_isas()


def angles(rows: int, half: int) -> tuple[Array, Array]:
    theta = np.random.default_rng(half).uniform(-4, 4, (rows, half))
    return np.cos(theta).astype(np.float32), np.sin(theta).astype(np.float32)


def rotated(x: Array, cos: Array, sin: Array, dim: int, interleaved: bool) -> Array:
    x = x.astype(np.float64)
    cos, sin = cos[:, None, : dim // 2].astype(np.float64), sin[:, None, : dim // 2].astype(np.float64)
    a, b = (x[..., 0:dim:2], x[..., 1:dim:2]) if interleaved else (x[..., : dim // 2], x[..., dim // 2 : dim])
    first, second = a * cos - b * sin, a * sin + b * cos
    y = x.copy()
    if interleaved:
        y[..., 0:dim:2], y[..., 1:dim:2] = first, second
    else:
        y[..., : dim // 2], y[..., dim // 2 : dim] = first, second
    return y


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_heads_of_a_packed_row(threads: int, interleaved: bool, isa: str) -> None:
    rng = np.random.default_rng(7)
    for tokens, (width, dim) in itertools.product(
        (1, 2, 33), [(2, 2), (64, 0), (64, 16), (80, 20), (96, 90), (128, 0)]
    ):
        packed = rng.standard_normal((tokens, 9 * width)).astype(np.float32)
        x = packed[:, 2 * width : 7 * width].reshape(tokens, 5, width)
        cos, sin = angles(tokens, (dim or width) // 2)
        y = np.zeros((tokens, 5, width), np.float32)
        attributes = {"dim": dim, "interleaved": int(interleaved)}
        run_operation("RotaryEmbedding", [x, cos, sin, None], [y], attributes, threads=threads, isa=isa)
        np.testing.assert_allclose(y, rotated(x, cos, sin, dim or width, interleaved), atol=1e-6)
        np.testing.assert_array_equal(y[..., dim or width :], x[..., dim or width :])
        # The same from tables by position, which may hold more columns than are rotated; and in place.
        positions = rng.permutation(50)[:tokens].astype(np.int64)
        tables = [np.zeros((50, cos.shape[1] + 3), np.float32) for _ in range(2)]
        tables[0][positions, :-3], tables[1][positions, :-3] = cos, sin
        run_operation("RotaryEmbedding", [x, *tables, positions], [x], attributes, threads=threads, isa=isa)
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("position", [-1, 8, 2**62, -(2**63)])
def test_positions_outside_the_table_give_nan(position: int, isa: str) -> None:
    x, (cos, sin) = np.ones((2, 1, 8), np.float32), angles(8, 4)
    y = np.zeros_like(x)
    positions = np.array([3, position], np.int64)
    run_operation("RotaryEmbedding", [x, cos, sin, positions], [y], {"dim": 0, "interleaved": 0}, isa=isa)
    assert np.isfinite(y[0]).all() and np.isnan(y[1]).all()


def _zeros(*shape: int, dtype: type = np.float32) -> Array:
    return np.zeros(shape, dtype)


X, COS, Y = _zeros(3, 2, 8), _zeros(3, 4), _zeros(3, 2, 8)


@pytest.mark.parametrize(
    ("inputs", "outputs", "attributes", "message"),
    [
        ([None, COS, COS], [Y], {}, "x"),
        ([X, COS, None], [Y], {}, "sin"),
        ([X[:, 0], COS, COS], [Y[:, 0]], {}, r"\[tokens, heads, width\]"),
        ([X, COS, COS], [_zeros(3, 2, 9)], {}, "y is"),
        ([X, COS, COS], [None], {}, "y is nothing"),
        ([X, COS, COS], [], {}, "0 outputs"),
        ([X, _zeros(2, 4), _zeros(2, 4)], [Y], {}, "a row for each token"),
        ([X, COS, _zeros(3, 3)], [Y], {}, "at least 4 columns"),
        ([X, _zeros(4, 4), _zeros(5, 4), _zeros(3, dtype=np.int64)], [Y], {}, "but sin is"),
        ([X, COS, COS, _zeros(2, dtype=np.int64)], [Y], {}, "positions are"),
        ([X, COS, COS, _zeros(3, dtype=np.int32)], [Y], {}, "positions are"),
        ([X, COS, COS], [Y], {"dim": 7}, "dim"),
        ([X, COS, COS], [Y], {"dim": 10}, "dim"),
        ([X, COS, COS], [Y], {"dim": -2}, "dim"),
        ([X, COS, COS], [Y], {"dim": "8"}, "wrong type"),
        ([X.astype(np.float16), COS, COS], [Y], {}, "x is f16"),
        ([_zeros(3, 2, 16)[:, :, ::2], COS, COS], [Y], {}, "contiguous rows"),
    ],
)
def test_malformed_rotations_are_refused(
    inputs: list[Array | None], outputs: list[Array | None], attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(_cpu.BlueprintError, match=message):
        run_operation("RotaryEmbedding", inputs, outputs, {"dim": 0, "interleaved": 0} | attributes)

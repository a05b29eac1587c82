from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inferencex.convert.native import _error_feedback as native
from tests.convert.quantize.gptq_reference import gptq
from tests.convert.quantize.inputs import correlated_inputs, heavy_tailed, statistics_of


def gram_of(channels: int, seed: int = 1) -> NDArray[np.float32]:
    gram = statistics_of(correlated_inputs(3 * channels + 8, channels, seed)).gram
    assert gram is not None
    return gram


def factor_of(
    gram: NDArray[np.float32], order: NDArray[np.int64], ridge: float, threads: int = 1, instruction_set: str = ""
) -> NDArray[np.float32]:
    factor = np.zeros_like(gram)
    assert native.factorize(gram, order, ridge, ridge / 2, factor, threads, instruction_set)
    return np.tril(factor)


@pytest.mark.parametrize("channels", [1, 7, 64, 65, 200])
def test_factor_gives_the_gram_matrix_back(channels: int) -> None:
    gram = gram_of(channels)
    order = np.random.default_rng(0).permutation(channels)
    ridge = 0.01 * float(gram.diagonal().mean())
    factor = factor_of(gram, order, ridge).astype(np.float64)
    pivots = factor.diagonal()
    unit = np.tril(factor, -1) + np.eye(channels)
    product = unit.T @ np.diag(pivots) @ unit
    expected = gram[np.ix_(order, order)].astype(np.float64) + ridge * np.eye(channels)
    np.testing.assert_allclose(product, expected, atol=2e-5 * float(gram.max()))
    assert pivots.min() > ridge / 2


def test_indefinite_matrix_is_refused() -> None:
    gram = gram_of(100)
    gram[3, 90] = gram[90, 3] = 4 * np.sqrt(gram[3, 3] * gram[90, 90])
    order = np.arange(100, dtype=np.int64)
    assert not native.factorize(gram, order, 1e-3, 5e-4, np.empty_like(gram), 2)
    nan = gram_of(100)
    nan[50, 50] = np.nan
    assert not native.factorize(nan, order, 1e-3, 5e-4, np.empty_like(gram), 2)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 70),
    channels=st.integers(1, 90),
    group_size=st.integers(1, 90),
    limits=st.sampled_from([(0.0, 15.0), (-8.0, 7.0), (0.0, 7.0), (-128.0, 127.0)]),
    seed=st.integers(0, 99),
)
def test_rounding_is_the_papers(
    rows: int, channels: int, group_size: int, limits: tuple[float, float], seed: int
) -> None:
    group_size = min(group_size, channels)
    random = np.random.default_rng(seed)
    weight, gram = heavy_tailed((rows, channels), seed), gram_of(channels, seed)
    groups = -(-channels // group_size)
    scales = random.uniform(0.005, 0.03, (rows, groups)).astype(np.float32)
    zeros = random.integers(int(limits[0]), int(limits[1]) + 1, (rows, groups)).astype(np.float32)
    ridge = 0.02 * float(gram.diagonal().mean())
    order = np.argsort(-gram.diagonal(), kind="stable")
    integers, errors = np.zeros_like(weight), np.empty(rows)
    native.round(weight, factor_of(gram, order, ridge), order, scales, zeros, group_size, *limits, integers, errors, 2)
    expected, dequantized = gptq(weight, gram, order, scales, zeros, group_size, limits, ridge)
    # Float32 may round a value near a half the other way, from where on the row goes its own way.
    same = (integers == expected).all(axis=1)
    assert same.mean() >= 0.8 or (~same).sum() <= 2
    np.testing.assert_allclose(errors[same], np.square(weight - dequantized).sum(axis=1)[same], rtol=1e-3, atol=1e-9)


def descended(
    weight: NDArray[np.float32], gram: NDArray[np.float32], sweeps: int, threads: int = 1, instruction_set: str = ""
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32], NDArray[np.float64]]:
    """Round to nearest, then descend; return integers, zero points, scales and squared errors."""
    rows, channels = weight.shape
    groups = -(-channels // 32)
    scales = np.full((rows, groups), np.float32(np.float16(0.02)))
    zeros = np.full((rows, groups), np.float32(7))
    integers, errors = np.clip(np.rint(weight / scales[0, 0]) + 7, 0, 15).astype(np.float32), np.empty(rows)
    native.descend(
        weight, gram, scales, zeros, 32, 0.0, 15.0, 1e-3, sweeps, True, 2.0**-14, 65504.0, integers, errors, threads,
        instruction_set,
    )  # fmt: skip
    return integers, zeros, scales, errors


def dequantized(
    integers: NDArray[np.float32], zeros: NDArray[np.float32], scales: NDArray[np.float32]
) -> NDArray[np.float64]:
    channels = integers.shape[1]

    def spread(values: NDArray[np.float32]) -> NDArray[np.float64]:
        return np.repeat(values.astype(np.float64), 32, axis=1)[:, :channels]

    return (integers - spread(zeros)) * spread(scales)


def test_every_sweep_of_descent_lowers_the_error_of_every_row() -> None:
    weight, gram = heavy_tailed((70, 100)), gram_of(100)
    last = np.full(70, np.inf)
    for sweeps in range(5):
        integers, zeros, scales, errors = descended(weight, gram, sweeps)
        difference = weight - dequantized(integers, zeros, scales)
        now = np.einsum("ni,ij,nj->n", difference, gram.astype(np.float64) + 1e-3 * np.eye(100), difference)
        assert (now <= last * (1 + 1e-5)).all()
        np.testing.assert_allclose(errors, np.square(difference).sum(axis=1), rtol=1e-4)
        assert ((integers >= 0) & (integers <= 15) & (integers == np.rint(integers))).all()
        assert (scales == scales.astype(np.float16).astype(np.float32)).all()
        last = now
    start, _, _, _ = descended(weight, gram, 0)
    assert (start != integers).any()


def test_descent_ends_where_no_single_integer_helps() -> None:
    weight, gram = heavy_tailed((5, 40)), gram_of(40)
    integers, zeros, scales, _ = descended(weight, gram, 60)
    ridged = gram.astype(np.float64) + 1e-3 * np.eye(40)

    def error(levels: NDArray[np.float32]) -> NDArray[np.float64]:
        difference = weight - dequantized(levels, zeros, scales)
        return np.einsum("ni,ij,nj->n", difference, ridged, difference)

    least = error(integers)
    for channel in range(40):
        for step in (-1, 1):
            moved = integers.copy()
            moved[:, channel] = np.clip(moved[:, channel] + step, 0, 15)
            assert (error(moved) >= least * (1 - 1e-5)).all()


def test_quadratic_is_the_quadratic_form() -> None:
    errors, gram = heavy_tailed((130, 77)), gram_of(77)
    found = np.empty(130)
    native.quadratic(errors, gram, found, 2)
    expected = np.einsum("ni,ij,nj->n", errors.astype(np.float64), gram.astype(np.float64), errors.astype(np.float64))
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_equal_bits_on_any_number_of_threads_and_any_instruction_set() -> None:
    weight, gram = heavy_tailed((150, 203)), gram_of(203)
    order = np.argsort(-gram.diagonal(), kind="stable")
    scales = np.full((150, 4), np.float32(0.02))
    outcomes = []
    for threads, instruction_set in [(1, ""), (2, ""), (7, ""), *((2, name) for name in native.instruction_sets())]:
        factor = factor_of(gram, order, 0.1, threads, instruction_set)
        integers, errors, squares = np.zeros_like(weight), np.empty(150), np.empty(150)
        native.round(
            weight, factor, order, scales, scales * 0 + 8, 64, 0.0, 15.0, integers, errors, threads, instruction_set
        )
        native.quadratic(weight, gram, squares, threads, instruction_set)
        arrays = (factor, integers, errors, squares, *descended(weight, gram, 2, threads, instruction_set))
        outcomes.append([array.tobytes() for array in arrays])
    assert all(outcome == outcomes[0] for outcome in outcomes)


def test_shapes_that_do_not_fit_are_refused() -> None:
    weight, gram = heavy_tailed((4, 10)), gram_of(10)
    order = np.arange(10, dtype=np.int64)
    scales, integers, errors = np.ones((4, 2), np.float32), np.zeros_like(weight), np.empty(4)
    for bad_order in (order[:9], np.zeros(10, dtype=np.int64), order + 1):
        with pytest.raises(ValueError, match="order"):
            native.round(weight, gram, bad_order, scales, scales, 5, 0.0, 15.0, integers, errors, 1)
    with pytest.raises(ValueError, match="scales"):
        native.round(weight, gram, order, scales[:3], scales, 5, 0.0, 15.0, integers, errors, 1)
    with pytest.raises(ValueError, match="group size"):
        native.round(weight, gram, order, scales, scales, 11, 0.0, 15.0, integers, errors, 1)
    with pytest.raises(ValueError, match="matrix"):
        native.round(weight, gram[:9], order, scales, scales, 5, 0.0, 15.0, integers, errors, 1)

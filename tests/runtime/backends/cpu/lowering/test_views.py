"""Views of storage do what numpy does without a copy, or say that they need one."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from inferencex.formats.errors import BackendError
from inferencex.runtime.backends.cpu.lowering.extents import Extent, Symbol, extent_named, product
from inferencex.runtime.backends.cpu.lowering.views import View, broadcast_dims, constant_view

T = Extent(1, Symbol.TOKENS)


def _strided(view: View, data: NDArray[np.int64]) -> NDArray[np.int64]:
    """Read a constant view through its dims and strides."""
    flat = data.reshape(-1)
    strides = [stride.coefficient * flat.itemsize for stride in view.strides]
    return np.lib.stride_tricks.as_strided(flat[view.offset :], [d.coefficient for d in view.dims], strides)


def _numbers(*shape: int) -> NDArray[np.int64]:
    return np.arange(math.prod(shape), dtype=np.int64).reshape(shape)


@st.composite
def _factorizations(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes with as many elements."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4, 5]), min_size=1, max_size=5))

    def grouped() -> list[int]:
        order = draw(st.permutations(factors)) if draw(st.booleans()) else factors
        cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=3)))
        bounds = [0, *cuts, len(order)]
        return [math.prod(order[a:b]) for a, b in itertools.pairwise(bounds)]

    return grouped(), grouped()


@given(_factorizations(), st.randoms(use_true_random=False))
def test_reshape_reads_what_numpy_reads_or_asks_for_a_copy(shapes: tuple[list[int], list[int]], random: object) -> None:
    source, wanted = shapes
    data = _numbers(*source)
    order = list(range(len(source)))
    random.shuffle(order)  # type: ignore[attr-defined]
    view = constant_view(data, "i64").transposed(order)
    expected = data.transpose(order)
    result = view.reshaped([Extent(size) for size in wanted])
    if result is None:
        shared = np.shares_memory(expected, expected.reshape(wanted))
        assert not shared, "numpy needs no copy here"
    else:
        np.testing.assert_array_equal(_strided(result, data), expected.reshape(wanted))


def test_heads_of_a_slice_are_views() -> None:
    data = _numbers(5, 24)
    part = constant_view(data, "i64").sliced(1, 8, Extent(12))
    assert part is not None
    heads = part.reshaped([Extent(5), Extent(3), Extent(4)])
    assert heads is not None
    np.testing.assert_array_equal(_strided(heads, data), data[:, 8:20].reshape(5, 3, 4))
    assert part.reshaped([Extent(60)]) is None


def test_sizes_that_depend_on_the_step_divide_and_multiply() -> None:
    two_t = Extent(2, Symbol.TOKENS)
    assert product([T, Extent(6)]) == Extent(6, Symbol.TOKENS)
    assert Extent(6, Symbol.TOKENS).divided_by(two_t) == Extent(3)
    assert Extent(6, Symbol.TOKENS).divided_by(Extent(4)) is None
    assert Extent(6).divided_by(T) is None
    assert extent_named("2*tokens") == two_t and extent_named("rows") == Extent(1, Symbol.ROWS)
    assert extent_named("batch") is None and extent_named(None) is None
    with pytest.raises(BackendError, match="tokens times tokens"):
        T * T


def test_broadcast_follows_numpy() -> None:
    data = _numbers(3, 1, 4)
    view = constant_view(data, "i64").broadcast_to([Extent(2), Extent(3), Extent(5), Extent(4)])
    np.testing.assert_array_equal(_strided(view, data), np.broadcast_to(data, (2, 3, 5, 4)))
    assert broadcast_dims([(T, Extent(1)), (Extent(4),)]) == (T, Extent(4))
    with pytest.raises(ValueError, match="do not broadcast"):
        broadcast_dims([(Extent(2),), (Extent(3),)])
    with pytest.raises(ValueError, match="does not broadcast"):
        constant_view(data, "i64").broadcast_to([Extent(2), Extent(1), Extent(4)])


def test_a_slice_in_front_of_the_tokens_is_no_view() -> None:
    storage = constant_view(_numbers(1), "i64").storage
    view = View(storage, "f32", (Extent(4), T, Extent(8)), (Extent(8, Symbol.TOKENS), Extent(8), Extent(1)))
    assert view.sliced(0, 1, Extent(1)) is None
    assert view.sliced(0, 0, Extent(1)) is not None

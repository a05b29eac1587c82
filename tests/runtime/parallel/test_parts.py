"""Parts of tensors, as ranges: against what numpy's own indexing gives."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencex.formats.dtypes import DataType
from inferencex.formats.packing import pack_bits
from inferencex.runtime.parallel.parts import (
    Part,
    clipped,
    count,
    even_cuts,
    from_indices,
    in_units,
    indices,
    positions,
    reshaped,
    union,
    whole,
)
from inferencex.runtime.parallel.tensors import TensorCut, cut_tensor

entries = st.sets(st.integers(0, 11), min_size=1)


def taken(
    array: np.ndarray[tuple[int, ...], np.dtype[np.int64]], part: Part
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    for axis, ranges in enumerate(part):
        if ranges is not None:
            array = array.take(indices(ranges), axis=axis)
    return array


@given(entries)
def test_ranges_hold_their_entries(chosen: set[int]) -> None:
    ranges = from_indices(chosen, 12)
    if ranges is None:
        assert chosen == set(range(12))
    else:
        assert list(indices(ranges)) == sorted(chosen)
        assert count(ranges) == len(chosen)
        assert all(one[1] < other[0] for one, other in pairwise(ranges))


@given(entries, entries)
def test_positions_are_places_among_what_there_is(inner: set[int], more: set[int]) -> None:
    outer = inner | more
    found = indices(positions(from_indices(inner, 13) or (), from_indices(outer, 13)))
    assert [sorted(outer)[place] for place in found] == sorted(inner)


@given(entries, entries)
def test_a_union_holds_both(left: set[int], right: set[int]) -> None:
    found = union((from_indices(left, 13),), (from_indices(right, 13),), (13,))
    assert found == (from_indices(left | right, 13),)


@given(entries, st.integers(0, 5), st.integers(6, 12))
def test_a_clipped_range_counts_from_its_start(chosen: set[int], start: int, stop: int) -> None:
    found = clipped(from_indices(chosen, 13), start, stop)
    expected = sorted(entry - start for entry in chosen if start <= entry < stop)
    assert list(indices(found if found is not None else ((0, stop - start),))) == expected


@given(entries)
def test_units_are_whole_or_refused(chosen: set[int]) -> None:
    found = in_units(from_indices(chosen, 13), 4, 13)
    expected = {entry // 4 for entry in chosen}
    if all({unit * 4 + i for i in range(4)} <= chosen for unit in expected):
        assert not isinstance(found, str) and list(indices(found or ())) == sorted(expected)
    else:
        assert isinstance(found, str)


@given(st.sets(st.integers(0, 2), min_size=1), st.sets(st.integers(0, 3), min_size=1))
def test_reshaping_keeps_the_entries(rows: set[int], columns: set[int]) -> None:
    part: Part = (None, from_indices(rows, 3), from_indices(columns, 4))
    array = np.arange(2 * 12).reshape(2, 3, 4)
    found = reshaped(part, ("tokens", 3, 4), ("tokens", 12))
    if found is not None:
        np.testing.assert_array_equal(taken(array.reshape(2, 12), found), taken(array, part).reshape(2, -1))
        assert reshaped(found, ("tokens", 12), ("tokens", 3, 4)) == part


def test_entries_that_are_no_block_of_rows_and_columns_cannot_be_reshaped() -> None:
    assert reshaped((None, ((0, 5),)), ("tokens", 12), ("tokens", 3, 4)) is None
    assert reshaped((None, ((0, 2),)), ("tokens", 4), ("2*tokens", 2)) is None
    assert reshaped(whole(2), ("tokens", 4), ("2*tokens", 2)) == whole(2)


@pytest.mark.parametrize(("size", "parts"), [(12, 3), (7, 3), (2, 5)])
def test_cuts_are_even(size: int, parts: int) -> None:
    cuts = even_cuts(size, parts)
    assert [entry for cut in cuts for entry in indices(cut)] == list(range(size))
    sizes = [count(cut) for cut in cuts]
    assert max(sizes) - min(sizes) <= 1


@given(st.sampled_from([3, 4, 5, 6]), st.integers(1, 6), st.integers(1, 17), st.data())
def test_packed_integers_are_cut_whatever_their_borders(
    bits: int, rows: int, columns: int, data: st.DataObject
) -> None:
    values = np.random.default_rng(0).integers(0, 1 << bits, (rows, columns), dtype=np.uint8)
    chosen_rows = data.draw(st.sets(st.integers(0, rows - 1), min_size=1))
    chosen = data.draw(st.sets(st.integers(0, columns - 1), min_size=1))
    part = (from_indices(chosen_rows, rows), from_indices(chosen, columns))
    cut = TensorCut("w", DataType.UINT8, (rows, columns), bits, part)
    expected = pack_bits(values[sorted(chosen_rows)][:, sorted(chosen)], bits)
    found = cut_tensor(pack_bits(values, bits), cut)
    np.testing.assert_array_equal(found, expected)
    assert found.nbytes == cut.nbytes == (math.prod(cut.cut_shape) * bits + 7) // 8


def test_rows_are_read_where_they_lie() -> None:
    stored = np.arange(64, dtype=np.uint8)
    rows = cut_tensor(stored, TensorCut("w", DataType.UINT4, (8, 16), 4, (((2, 4),), None)))
    assert np.shares_memory(rows, stored) and rows.tolist() == list(range(16, 32))
    plain = cut_tensor(stored.reshape(8, 8), TensorCut("w", DataType.INT8, (8, 8), 8, (((2, 4),), ((0, 4),))))
    assert np.shares_memory(plain, stored) and plain.shape == (2, 4)

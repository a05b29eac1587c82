from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from inferencex.convert.native import _gram

pytestmark = pytest.mark.skipif(not _gram.supported(), reason="this processor lacks AVX512-BF16")


@pytest.mark.parametrize("shape", [(1, 1), (2, 48), (7, 49), (513, 100), (1100, 47), (0, 5)])
def test_sums_are_those_of_the_rounded_rows(shape: tuple[int, int]) -> None:
    rows = np.random.default_rng(0).normal(size=shape).astype(ml_dtypes.bfloat16)
    gram = np.full((shape[1], shape[1]), 2.0, dtype=np.float32)
    _gram.accumulate(rows.view(np.uint16), gram, 2)
    wide = rows.astype(np.float64)
    np.testing.assert_allclose(gram, 2.0 + wide.T @ wide, rtol=1e-5, atol=1e-3)
    assert (gram == gram.T).all()


def test_threads_do_not_matter() -> None:
    rows = np.random.default_rng(0).normal(size=(600, 333)).astype(ml_dtypes.bfloat16).view(np.uint16)
    outcomes = []
    for threads in (1, 2, 5):
        gram = np.zeros((333, 333), dtype=np.float32)
        _gram.accumulate(rows, gram, threads)
        outcomes.append(gram.tobytes())
    assert len(set(outcomes)) == 1


def test_few_rows_give_a_matrix_that_is_positive() -> None:
    rows = np.random.default_rng(0).normal(size=(300, 200)).astype(ml_dtypes.bfloat16)
    rows[:, :4] *= 100
    gram = np.zeros((200, 200), dtype=np.float32)
    _gram.accumulate(rows.view(np.uint16), gram, 2)
    assert np.linalg.eigvalsh(gram.astype(np.float64)).min() > -1e-6 * float(gram.max())


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="channels"):
        _gram.accumulate(np.zeros((4, 6), np.uint16), np.zeros((5, 5), np.float32), 1)

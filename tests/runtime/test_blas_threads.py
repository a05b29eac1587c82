"""Idle threads of numpy's BLAS sleep where nobody has said otherwise, and nothing of it is left behind."""

from __future__ import annotations

import os
import sys

import pytest

from inferencex.runtime.blas_threads import LOOKING_TIME, idle_blas_threads_sleep


@pytest.mark.parametrize(
    ("has_numpy", "before", "meanwhile"),
    [(False, None, "4"), (True, None, None), (False, "20", "20"), (True, "20", "20")],
)
def test_the_environment_says_so_only_while_numpy_is_imported(
    monkeypatch: pytest.MonkeyPatch, has_numpy: bool, before: str | None, meanwhile: str | None
) -> None:
    if has_numpy:
        monkeypatch.setitem(sys.modules, "numpy", sys)
    else:
        monkeypatch.delitem(sys.modules, "numpy", raising=False)
    if before is None:
        monkeypatch.delenv(LOOKING_TIME, raising=False)
    else:
        monkeypatch.setenv(LOOKING_TIME, before)
    with pytest.raises(ValueError, match="within"), idle_blas_threads_sleep():
        assert os.environ.get(LOOKING_TIME) == meanwhile
        raise ValueError("within")
    assert os.environ.get(LOOKING_TIME) == before

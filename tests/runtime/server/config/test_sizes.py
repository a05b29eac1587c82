from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencex.runtime.server.config.sizes import parse_size, show_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4GiB", 4 << 30),
        ("4 GiB", 4 << 30),
        ("512MB", 512_000_000),
        ("1.5gib", 3 << 29),
        ("100", 100),
        ("2k", 2000),
        ("1TiB", 1 << 40),
    ],
)
def test_units(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "4XB", "1e9", "four", "4 Gi B"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size such as 4GiB"):
        parse_size(text)


@given(st.integers(min_value=1, max_value=1 << 50))
def test_what_is_shown_is_read_back(nbytes: int) -> None:
    assert parse_size(show_size(nbytes)) == nbytes

"""Mapped files are opened again only where their path still names them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from inferencex.formats.bundle.mapped_file import MappedFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(100)))
    return path


def test_the_same_file_is_opened(path: Path) -> None:
    mapped = MappedFile.map(path)
    np.testing.assert_array_equal(mapped.data, np.arange(100, dtype=np.uint8))
    assert not mapped.data.flags.writeable
    descriptor = mapped.open()
    assert descriptor is not None
    assert os.pread(descriptor, 3, 50) == bytes([50, 51, 52])
    os.close(descriptor)


def test_another_file_of_its_name_is_not(path: Path) -> None:
    mapped = MappedFile.map(path)
    other = path.with_name("other")
    other.write_bytes(bytes(100))
    other.replace(path)
    assert mapped.open() is None
    path.unlink()
    assert mapped.open() is None
    assert mapped.data[99] == 99


def test_what_was_given_back_can_be_read_again(path: Path) -> None:
    mapped = MappedFile.map(path)
    assert mapped.data.sum() == 4950
    mapped.release()
    assert mapped.data.sum() == 4950

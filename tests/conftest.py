"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import triton_kernels

triton_kernels.prepare()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of tiny trained models and texts; skip where it is absent."""
    root = Path(__file__).resolve().parents[1]
    folder = Path(os.environ.get("INFERENCEX_SHARED_DATA", root.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"the shared test data is not at {folder} (set INFERENCEX_SHARED_DATA)")
    return folder

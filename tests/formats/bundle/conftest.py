from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from inferencex.formats.bundle import BundleWriter
from tests.formats.bundle.small import fill


@pytest.fixture
def make_bundle(tmp_path: Path) -> Callable[..., Path]:
    def make(name: str = "bundle") -> Path:
        with BundleWriter(tmp_path / name) as writer:
            fill(writer)
            return writer.commit()

    return make

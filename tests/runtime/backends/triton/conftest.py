"""The device that kernels are tried on, and a small bundle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import triton_kernels

if triton_kernels.AVAILABLE:
    triton_kernels.hasten_interpreter()
else:
    collect_ignore_glob = ["*"]


@pytest.fixture
def device() -> str:
    """The torch device that kernels are tried on."""
    return triton_kernels.device()


@pytest.fixture(autouse=True)
def own_configurations(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Launch with the defaults, but for what a test itself has kept."""
    from inferencex.runtime.backends.triton.tuning.cache import read_again

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    read_again()
    yield
    read_again()


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers with grouped queries, in floats."""
    from tests.architectures.comparison import write_bundle
    from tests.architectures.shrink import tiny_config
    from tests.architectures.zoo import tiny_model

    return write_bundle(tiny_model("qwen2"), tiny_config("qwen2"), tmp_path_factory.mktemp("triton"))

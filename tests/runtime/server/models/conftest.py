"""Models to serve: a real bundle of a tiny model, and a loader of models without weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.server.models.hash_loader import HashLoader


@pytest.fixture
def loader(hash_backend_class: Callable[[], Any]) -> HashLoader:
    return HashLoader(hash_backend_class)


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.architectures.comparison import write_bundle
    from tests.architectures.zoo import tiny_config, tiny_model

    return write_bundle(tiny_model("llama"), tiny_config("llama"), tmp_path_factory.mktemp("tiny"), "rtn-int4")

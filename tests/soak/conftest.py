"""The model of the soak."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.server.serving import CHAT_TEMPLATE, write_tiny_bundle


@pytest.fixture(scope="session")
def tiny_chat_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, as a bundle in a folder of its own."""
    return write_tiny_bundle(tmp_path_factory.mktemp("soak"), CHAT_TEMPLATE)

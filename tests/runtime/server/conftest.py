"""Small bundles with a tokenizer, for tests that serve real tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.server.serving import CHAT_TEMPLATE, write_tiny_bundle


@pytest.fixture(scope="session")
def stories_bundle(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 260,000 parameters that tells children's stories, as a bundle."""
    from tests.formats.export.models import bundle

    return bundle(shared_data / "stories260k", tmp_path_factory.mktemp("serve") / "stories", "none")


@pytest.fixture(scope="session")
def tiny_chat_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights that takes chats with tools, as a bundle in a folder of its own."""
    return write_tiny_bundle(tmp_path_factory.mktemp("chat"), CHAT_TEMPLATE)

"""Starting scripted servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.runtime.load_test.fake_server import FakeServer


@pytest.fixture
def serve() -> Iterator[Callable[..., FakeServer]]:
    """Start servers that end with the test; arguments are those of FakeServer."""
    with ExitStack() as servers:
        yield lambda **options: servers.enter_context(FakeServer(**options))

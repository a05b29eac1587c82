"""One server, as its users start it, for all clients of the field; it has to end cleanly after all they did."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.runtime.server.running import RunningServer

MODEL = "tiny"
DOCUMENTED_MODEL = "smollm2-135m-instruct-int4"  # as docs/serving.md calls it
KEY = "your-api-key"  # as docs/serving.md has it
LIMITED_KEY = "a-key-for-one-request-a-minute"


@dataclass(frozen=True)
class Endpoint:
    """Where the server is, and what it serves."""

    url: str
    bundle: Path
    model: str = MODEL
    key: str = KEY
    limited_key: str = LIMITED_KEY

    @property
    def api(self) -> str:
        """What clients of OpenAI's API take as their base URL."""
        return f"{self.url}/v1"


@pytest.fixture(scope="session")
def endpoint(tiny_chat_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """A running server with a tiny model that takes chats and tools."""
    config = tmp_path_factory.mktemp("clients") / "config.json"  # JSON is YAML
    settings = {
        "model": {"path": str(tiny_chat_bundle), "served_model_name": [MODEL, DOCUMENTED_MODEL]},
        "server": {"port": 0, "api_keys": [KEY, {"key": LIMITED_KEY, "requests_per_minute": 1}]},
        "engine": {"threads": 1, "max_num_seqs": 16},
    }
    config.write_text(json.dumps(settings), encoding="utf-8")
    with RunningServer("--config", config) as server:
        yield Endpoint(server.wait_until_ready(), tiny_chat_bundle)
        assert server.stop() == 0, server.log
    assert "Traceback" not in server.log, server.log

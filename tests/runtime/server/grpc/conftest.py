"""A real model behind gRPC."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferencex.runtime import LLM


@pytest.fixture(scope="session")
def llm(tiny_chat_bundle: Path) -> LLM:
    return LLM(tiny_chat_bundle, threads=1, max_num_seqs=16, num_kv_blocks=128)

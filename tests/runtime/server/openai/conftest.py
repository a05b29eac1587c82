from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.server.openai.serving import Serve, serve

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def backend(hash_backend_class: Callable[..., Any]) -> Any:
    return hash_backend_class(max_model_len=8192)


@pytest.fixture
def served(text_bundle: Path, backend: Any) -> Serve:
    """Run a scenario against a model without weights."""
    return partial(serve, text_bundle, backend=backend, num_kv_blocks=1024)


@pytest.fixture(scope="session")
def stories(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a real model with a quarter of a million weights."""
    from inferencex.convert.pipeline import ConvertOptions, convert
    from inferencex.convert.quantize import parse_scheme
    from tests.smollm2 import Quiet

    path = tmp_path_factory.mktemp("stories") / "bundle"
    convert(ConvertOptions(str(shared_data / "stories260k"), path, parse_scheme("none")), Quiet())
    return path

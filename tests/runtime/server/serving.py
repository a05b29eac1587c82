"""A service with one model, for tests of what speaks to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from inferencex.runtime import LLM
from inferencex.runtime.server.access.quotas import Quotas
from inferencex.runtime.server.models.loading import LoadedReplicas
from inferencex.runtime.server.models.registry import ModelRegistry
from inferencex.runtime.server.models.version import LoadRequest
from inferencex.runtime.server.service import InferenceService, ServiceLimits

MODEL = "tiny"
LONG = 900  # tokens that take the tiny model long enough to be interrupted
MAX_MODEL_LEN = 1024

# Tools are written into the prompt, and calls are looked for as Hermes and Qwen write them.
CHAT_TEMPLATE = """{%- if tools %}Call a tool as <tool_call>{"name": ..., "arguments": ...}</tool_call>:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


def write_tiny_bundle(folder: Path, template: str | None = None) -> Path:
    """Convert a tiny model with a tokenizer and a chat template; its weights are random, and always the same."""
    from tests.formats.export import models

    source = models.checkpoint(folder / "source", max_position_embeddings=MAX_MODEL_LEN)
    if template is not None:
        (source / "chat_template.jinja").write_text(template, encoding="utf-8")
    return models.bundle(source, folder / "bundle", "none")


def speak(llm: LLM, backend: Any, text: str) -> LLM:
    """Have a model without weights answer every prompt with a text, and then end."""
    script = [*llm.require_tokenizer().encode(text, add_special_tokens=False), 0]

    def next_token(context: list[int], logits: Any) -> Any:
        begin = len(prompt)
        logits[script[min(len(context) - begin, len(script) - 1)]] = 50.0
        return logits

    prompt: list[int] = []

    def before(batch: Any) -> None:
        prompt[:] = [0] * int(batch.prompt_lengths[0])

    backend.model.before_step = before
    backend.model.transform = next_token
    return llm


@asynccontextmanager
async def serving(llm: LLM, limits: ServiceLimits | None = None) -> AsyncIterator[InferenceService]:
    """Serve a model. Afterwards nothing may be left of any request."""
    registry = ModelRegistry(loader=lambda path, options, progress: LoadedReplicas([llm], options, None))
    service = InferenceService(registry, Quotas(), limits=limits)
    model = await registry.load(LoadRequest(MODEL, Path(MODEL), aliases=("other",), required=True)).loaded()
    try:
        yield service
        assert await service.drained(30)
        assert not llm.engine.has_unfinished and llm.stats.kv_blocks_used == 0
        llm.engine.check_integrity()
    finally:
        for loop in model.loops:
            await asyncio.to_thread(loop.stop)

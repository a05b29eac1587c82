"""What has been answered keeps nothing of the model that answered it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from tests.runtime.server.openai.serving import MODEL, Serve, Served

_CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
_TEXT = {"model": MODEL, "prompt": "hello", "max_tokens": 4}
_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [1]}}}

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", _TEXT),
    "several completions": ("/v1/completions", {**_TEXT, "n": 2, "best_of": 3, "temperature": 1}),
    "log-probabilities": ("/v1/completions", {**_TEXT, "logprobs": 3, "echo": True}),
    "stop strings": ("/v1/completions", {**_TEXT, "stop": ["e"], "logit_bias": {"3": 5}}),
    "chat": ("/v1/chat/completions", _CHAT),
    "chat with log-probabilities": ("/v1/chat/completions", {**_CHAT, "logprobs": True, "top_logprobs": 2}),
    "structured": ("/v1/chat/completions", {**_CHAT, "response_format": _SCHEMA}),
    "tools": ("/v1/chat/completions", {**_CHAT, "tools": [_TOOL], "tool_choice": "required"}),
    "responses": ("/v1/responses", {"model": MODEL, "input": "hello", "max_output_tokens": 4}),
    "embeddings": ("/v1/embeddings", {"model": MODEL, "input": "hello"}),
    "tokens": ("/tokenize", {"model": MODEL, "prompt": "hello"}),
    "text": ("/detokenize", {"model": MODEL, "tokens": [3, 4]}),
    "refused": ("/v1/completions", {**_TEXT, "max_tokens": -1}),
}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", REQUESTS)
def test_a_model_is_gone_when_it_was_closed(served: Serve, backend: Any, kind: str, streamed: bool) -> None:
    path, body = REQUESTS[kind]
    kept: dict[str, weakref.ref[Any]] = {}

    async def scenario(server: Served) -> None:
        tokenizer = server.llm.require_tokenizer()
        kept.update(
            llm=weakref.ref(server.llm), engine=weakref.ref(server.llm.engine), tokenizer=weakref.ref(tokenizer)
        )
        answer = await server.client.post(path, json={**body, "stream": True} if streamed else body)
        assert answer.status_code < 500, answer.text

    served(scenario)
    backend.model.transform = None  # which the scenario's frame set
    gc.collect()
    assert [name for name, reference in kept.items() if reference() is not None] == []

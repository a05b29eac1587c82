"""Errors arrive as the classes that users of the official `openai` client catch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("openai", reason="needs the package openai")

import openai

from tests.runtime.server.clients.conftest import Endpoint

MESSAGES: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(endpoint: Endpoint) -> Iterator[Any]:
    with openai.OpenAI(base_url=endpoint.api, api_key=endpoint.key, max_retries=0) as made:
        yield made


def test_a_wrong_key(client: Any) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        client.with_options(api_key="wrong").models.list()
    assert caught.value.code == "invalid_api_key" and caught.value.request_id


def test_an_unknown_model(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nobody", messages=MESSAGES)
    assert caught.value.code == "model_not_found" and "nobody" in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 100_000}, None),
        ({"stop": 1}, "stop"),
        ({"extra_body": {"max_tokns": 3}}, "max_tokns"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_cannot_be_done(client: Any, endpoint: Endpoint, fields: Any, param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=endpoint.model, messages=MESSAGES, **fields)
    assert caught.value.type == "invalid_request_error"
    assert param is None or caught.value.param == param
    # A stream that is refused is refused before it begins.
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=endpoint.model, messages=MESSAGES, stream=True, **fields)


def test_a_quota_that_is_used_up(client: Any, endpoint: Endpoint) -> None:
    limited = client.with_options(api_key=endpoint.limited_key)
    asked: Any = {"model": endpoint.model, "messages": MESSAGES, "max_tokens": 1}
    with pytest.raises(openai.RateLimitError) as caught:
        for _ in range(2):
            limited.chat.completions.create(**asked)
    assert int(caught.value.response.headers["Retry-After"]) > 0


def test_a_connection_that_is_refused() -> None:
    with pytest.raises(openai.APIConnectionError):
        openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="any", max_retries=0).models.list()

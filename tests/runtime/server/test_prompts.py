"""Prompts far too long are refused before a tokenizer is kept busy with them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inferencex.formats.errors import RequestError
from inferencex.runtime import LLM, SamplingParams
from inferencex.runtime.server.calls import Call, Chat
from inferencex.runtime.server.errors import invalid
from inferencex.runtime.server.prompts import read_prompt
from inferencex.runtime.text.tokenizer import Tokenizer
from tests.runtime.conftest import HashBackend

LONG = "so and so " * 400_000


@pytest.fixture
def llm(text_bundle: Path) -> Iterator[LLM]:
    vocab_size = Tokenizer.load(text_bundle).vocab_size
    with LLM(text_bundle, backend=HashBackend(vocab_size)) as llm:
        yield llm


def call(prompt: Any) -> Call:
    return Call(None, prompt, SamplingParams(), "x", "completions")


@pytest.mark.parametrize("prompt", [LONG, Chat([{"role": "user", "content": LONG}])], ids=["text", "chat"])
def test_what_no_tokens_could_fit_is_not_tokenized(llm: LLM, prompt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("the tokenizer was asked"))
    with pytest.raises(
        RequestError, match=r"of 4\d{6} characters has at least \d+ tokens, more than the context"
    ) as raised:
        asyncio.run(read_prompt(llm, call(prompt)))
    assert invalid(raised.value).code == "context_length_exceeded"


def test_what_may_fit_is_tokenized(llm: LLM) -> None:
    text = "the cat sat " * 100
    read = asyncio.run(read_prompt(llm, call(text)))
    assert read.token_ids == llm.require_tokenizer().encode(text)

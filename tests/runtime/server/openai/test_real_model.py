"""A model with weights behind the API: it tells stories, gives embeddings, and takes the official client's requests."""

from __future__ import annotations

import base64
import itertools
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.runtime.server.openai.serving import MODEL, Serve, Served, serve

EMBEDDINGS = "/v1/embeddings"


@pytest.fixture
def storyteller(stories: Path) -> Serve:
    return partial(serve, stories, threads=1)


def test_a_story(storyteller: Serve) -> None:
    async def scenario(served: Served) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "logprobs": 2, "echo": True}
        [choice] = (await served.post("/v1/completions", body))["choices"]
        assert choice["text"].startswith("Once upon a time, there was")
        found = choice["logprobs"]
        offsets = [*found["text_offset"], len(choice["text"])]
        pieces = [choice["text"][start:end] for start, end in itertools.pairwise(offsets)]
        assert "".join(pieces) == choice["text"]
        # The tokenizer begins a text with a token of its own and a space that is not in the text.
        assert [piece for piece in pieces if piece][1:] == found["tokens"][2:]

    storyteller(scenario)


def test_embeddings(storyteller: Serve) -> None:
    async def scenario(served: Served) -> None:
        body = {"model": MODEL, "input": ["Once upon a time", "The dog"], "encoding_format": "float"}
        answer = await served.post(EMBEDDINGS, body)
        vectors = [entry["embedding"] for entry in answer["data"]]
        assert [entry["index"] for entry in answer["data"]] == [0, 1] and answer["object"] == "list"
        assert all(math.isclose(np.linalg.norm(vector), 1.0, rel_tol=1e-5) for vector in vectors)
        tokens = [(await served.post("/tokenize", {"prompt": text}))["tokens"] for text in body["input"]]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, tokens))
        of_ids = await served.post(EMBEDDINGS, {"input": tokens})
        assert np.allclose([entry["embedding"] for entry in of_ids["data"]], vectors, atol=1e-6)
        coded = await served.post(EMBEDDINGS, {**body, "encoding_format": "base64"})
        read = np.frombuffer(base64.b64decode(coded["data"][1]["embedding"]), dtype="<f4")
        assert np.allclose(read, vectors[1], atol=1e-6)
        cut = await served.post(EMBEDDINGS, {**body, "dimensions": 8})
        first = np.array(vectors[0][:8])
        assert np.allclose(cut["data"][0]["embedding"], first / np.linalg.norm(first), atol=1e-6)
        last = await served.post(EMBEDDINGS, {**body, "pooling": "last"})
        assert not np.allclose(last["data"][0]["embedding"], vectors[0], atol=1e-3)
        assert (await served.refused(EMBEDDINGS, {**body, "dimensions": 100_000}))["param"] == "dimensions"
        assert (await served.refused(EMBEDDINGS, {"input": []}))["param"] == "input"
        assert (await served.refused(EMBEDDINGS, {"input": [[]]}))["param"] == "input.0"

    storyteller(scenario)


def test_a_model_without_a_chat_template(storyteller: Serve) -> None:
    async def scenario(served: Served) -> None:
        error = await served.refused("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})
        assert "no chat template" in error["message"]

    storyteller(scenario)

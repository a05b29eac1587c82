"""What `LLM` offers beside plain continuations: grammars, embeddings, and an end."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("llguidance", reason="needs the extra inferencex[serve]")

from inferencex.formats.errors import BackendError, RequestError
from inferencex.runtime import LLM, EmbeddingOutput, Grammar, SamplingParams
from inferencex.runtime.backends.base import BackendOptions, ModelFacts, StepBatch
from tests.runtime.conftest import HashModel

PARAMS = SamplingParams(temperature=1.0, seed=4, max_tokens=60)
POINT = Grammar.json_schema(
    {
        "type": "object",
        "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "on": {"type": "boolean"}},
        "required": ["x", "on"],
        "additionalProperties": False,
    }
)
DIGITS = Grammar.regex("[0-9]{4}")


class HiddenHashModel(HashModel):
    hidden_size = 16

    def hidden_states(self, batch: StepBatch) -> NDArray[np.float32]:
        return self.step(batch)[:, :16]


class HiddenHashBackend:
    name = "hidden hash"

    def __init__(self, vocab_size: int = 330) -> None:
        self.facts = ModelFacts(vocab_size, 256, 1, 4)

    def supports(self, bundle: Path) -> Sequence[str]:
        return ()

    def compile(self, bundle: Path, options: BackendOptions) -> HiddenHashModel:
        return HiddenHashModel(options.blocks_for(self.facts), options.block_size, self.facts.vocab_size, 256)


def test_one_grammar_for_all_or_one_each(text_bundle: Path, hash_backend: Any) -> None:
    llm = LLM(text_bundle, backend=hash_backend)
    for output in llm.generate(["the", "cat"], PARAMS, grammar=DIGITS):
        [completion] = output.outputs
        assert re.fullmatch("[0-9]{4}", completion.text) and completion.finish_reason == "stop"
    point, free, digits = llm.generate(["a", "b", "c"], PARAMS, grammar=[POINT, None, DIGITS])
    assert set(json.loads(point.outputs[0].text)) == {"x", "on"}
    assert free.outputs == llm.generate("b", PARAMS)[0].outputs
    assert re.fullmatch("[0-9]{4}", digits.outputs[0].text)
    with pytest.raises(RequestError, match="2 grammar for 1 prompts"):
        llm.generate("a", PARAMS, grammar=[POINT, None])
    with pytest.raises(RequestError, match="expected a Grammar"):
        llm.generate("a", PARAMS, grammar={"type": "object"})  # type: ignore[arg-type]
    assert not llm.engine.has_unfinished


def test_chats_and_streams_too(text_bundle: Path, hash_backend: Any) -> None:
    llm = LLM(text_bundle, backend=hash_backend)
    question = [{"role": "user", "content": "the cat?"}]
    [answer] = llm.chat(question, PARAMS, grammar=POINT)
    text = answer.outputs[0].text
    assert json.loads(text)["on"] in (True, False)
    assert "".join(delta.text for delta in llm.stream_chat(question, PARAMS, grammar=POINT)) == text
    *_, last = llm.stream("the", PARAMS, grammar=DIGITS)
    assert last.finish_reason == "stop"
    assert last.output is not None and re.fullmatch("[0-9]{4}", last.output.outputs[0].text)


def test_continuations_of_one_prompt(text_bundle: Path, hash_backend: Any) -> None:
    llm = LLM(text_bundle, backend=hash_backend)
    params = SamplingParams(temperature=1.0, seed=4, n=5, max_tokens=60)
    [output] = llm.generate("the", params, grammar=DIGITS)
    texts = [completion.text for completion in output.outputs]
    assert len(set(texts)) > 1 and all(re.fullmatch("[0-9]{4}", text) for text in texts)


def test_stop_strings_end_constrained_texts_too(text_bundle: Path, hash_backend: Any) -> None:
    llm = LLM(text_bundle, backend=hash_backend)
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=60, stop='"on"')
    [output] = llm.generate("the", params, grammar=POINT)
    [completion] = output.outputs
    assert (completion.finish_reason, completion.stop_reason) == ("stop", '"on"')
    assert completion.text.startswith("{") and '"on"' not in completion.text
    # One that never comes holds nothing back.
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=60, stop="}}")
    [output] = llm.generate("the", params, grammar=POINT)
    assert output.outputs[0].stop_reason is None and set(json.loads(output.outputs[0].text)) == {"x", "on"}


def test_the_vocabulary_may_be_padded(text_bundle: Path) -> None:
    llm = LLM(text_bundle, backend=HiddenHashBackend(1000))
    [output] = llm.generate("the", PARAMS, grammar=POINT)
    assert set(json.loads(output.outputs[0].text)) == {"x", "on"}


def test_embeddings_of_texts_and_ids(text_bundle: Path) -> None:
    llm = LLM(text_bundle, backend=HiddenHashBackend())
    texts = ["the cat", "sat on the mat", "日本語"]
    outputs = llm.embed(texts)
    assert [output.prompt for output in outputs] == texts
    for output in outputs:
        assert isinstance(output, EmbeddingOutput)
        assert output.embedding.shape == (16,) and np.linalg.norm(output.embedding) == pytest.approx(1, abs=1e-6)
    ids = [llm.require_tokenizer().encode(text) for text in texts]
    assert all(np.array_equal(a.embedding, b.embedding) for a, b in zip(llm.embed(ids), outputs, strict=True))
    mean, plain = (llm.embed("the cat", pooling="mean", normalize=n)[0].embedding for n in (True, False))
    assert np.allclose(mean, plain / np.linalg.norm(plain), atol=1e-6)
    assert not np.array_equal(mean, outputs[0].embedding)
    assert llm.embed([]) == [] and not llm.engine.has_unfinished
    with pytest.raises(RequestError, match="expected one of: last, mean"):
        llm.embed("the", pooling="max")  # type: ignore[arg-type]


def test_models_without_hidden_states_say_so(text_bundle: Path, hash_backend: Any) -> None:
    with pytest.raises(RequestError, match="this model gives no embeddings"):
        LLM(text_bundle, backend=hash_backend).embed("the cat")


def test_closed_models_hold_nothing_and_serve_nothing(text_bundle: Path) -> None:
    with LLM(text_bundle, backend=HiddenHashBackend()) as llm:
        model = weakref.ref(llm.engine.executable)
        stream = llm.stream("the cat", PARAMS)
        next(stream)
    gc.collect()
    assert model() is None
    for call in (
        lambda: llm.generate("the"),
        lambda: llm.embed("the"),
        lambda: llm.chat([{"role": "user", "content": "the cat?"}]),
        lambda: next(llm.stream("the")),
        lambda: next(stream),
        lambda: llm.engine.add_request("x", [1]),
        lambda: llm.engine.add_embedding("x", [1]),
        lambda: llm.engine.executable.step(None),  # type: ignore[arg-type]
    ):
        with pytest.raises(BackendError, match="closed"):
            call()
    assert llm.stats.num_aborted_requests == 1 and llm.stats.kv_blocks_used == 0
    llm.close()  # once more does no harm

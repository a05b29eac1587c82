"""Embeddings go through the scheduler as everything does, beside requests that generate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inferencex.formats.errors import BackendError, ContextLengthError, RequestError
from inferencex.runtime.backends.base import HiddenStatesExecutable, StepBatch
from inferencex.runtime.engine.engine import Engine
from inferencex.runtime.engine.scheduler import SchedulerOptions
from inferencex.runtime.outputs import EmbeddingOutput, RequestOutput
from inferencex.runtime.params import SamplingParams
from tests.runtime.conftest import HashModel, hash_logits

VOCAB, HIDDEN = 50, 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = [[7], [1, 2, 3], list(range(20)), [5, 4, 3, 2, 1] * 5, list(range(16)), list(range(17))]


class HiddenHashModel(HashModel):
    """Its hidden states are the first few of its logits."""

    hidden_size = HIDDEN

    def hidden_states(self, batch: StepBatch) -> NDArray[np.float32]:
        return self.step(batch)[:, :HIDDEN]


def run(engine: Engine) -> dict[str, RequestOutput]:
    outputs = {}
    while engine.has_unfinished:
        for delta in engine.step():
            if delta.output is not None:
                outputs[delta.request_id] = delta.output
        engine.check_integrity()
    assert engine.stats.kv_blocks_used == 0 and engine._num_embedded == 0
    return outputs


def embed(engine: Engine, prompts: Sequence[Sequence[int]], **options: Any) -> list[NDArray[np.float32]]:
    for index, prompt in enumerate(prompts):
        engine.add_embedding(str(index), prompt, **options)
    outputs = run(engine)
    embeddings = []
    for index, prompt in enumerate(prompts):
        output = outputs[str(index)]
        assert isinstance(output, EmbeddingOutput)
        assert (output.outputs, output.error, output.prompt_token_ids) == ((), None, tuple(prompt))
        assert output.embedding.dtype == np.float32 and output.embedding.shape == (HIDDEN,)
        embeddings.append(output.embedding)
    return embeddings


def expected(prompt: Sequence[int], pooling: str, normalize: bool) -> NDArray[np.float32]:
    rows = [hash_logits(prompt[: i + 1], VOCAB)[:HIDDEN].astype(np.float64) for i in range(len(prompt))]
    vector = rows[-1] if pooling == "last" else sum(rows[1:], rows[0]) / len(rows)
    if normalize:
        vector = vector / np.sqrt(np.dot(vector, vector))
    return np.asarray(vector, dtype=np.float32)


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, 7, 1024])
def test_neither_chunks_nor_batches_change_a_bit(pooling: str, normalize: bool, chunk: int) -> None:
    model = HiddenHashModel()
    assert isinstance(model, HiddenStatesExecutable)
    engine = Engine(model, SchedulerOptions(max_num_batched_tokens=chunk, max_num_seqs=4))
    for result, prompt in zip(embed(engine, PROMPTS, pooling=pooling, normalize=normalize), PROMPTS, strict=True):
        assert np.array_equal(result, expected(prompt, pooling, normalize))
    assert max(len(batch.token_ids) for batch in model.batches) <= chunk
    wanted = sum(len(batch.logit_rows) for batch in model.batches)
    assert wanted == (len(PROMPTS) if pooling == "last" else sum(map(len, PROMPTS)))


def test_prefixes_are_shared_where_only_the_last_token_counts() -> None:
    engine = Engine(HiddenHashModel(block_size=4))
    prompt = list(range(18))
    first = embed(engine, [prompt])
    for pooling, cached in (("last", 16), ("mean", 0)):
        engine.add_embedding("again", prompt, pooling)
        output = run(engine)["again"]
        assert isinstance(output, EmbeddingOutput) and output.num_cached_tokens == cached
        assert np.array_equal(output.embedding, expected(prompt, pooling, True))
    assert np.array_equal(first[0], expected(prompt, "last", True))
    # What was read for an embedding is found by a request that generates.
    engine.add_request("next", prompt, GREEDY)
    assert run(engine)["next"].num_cached_tokens == 16


def test_they_run_beside_requests_that_generate() -> None:
    model = HiddenHashModel()
    engine = Engine(model, SchedulerOptions(max_num_batched_tokens=8))
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(f"g{index}", prompt, GREEDY)
        engine.add_embedding(f"e{index}", prompt, "mean")
    outputs = run(engine)
    for index, prompt in enumerate(PROMPTS):
        assert list(outputs[f"g{index}"].outputs[0].token_ids) == model.greedy(prompt, 12)
        output = outputs[f"e{index}"]
        assert isinstance(output, EmbeddingOutput)
        assert np.array_equal(output.embedding, expected(prompt, "mean", True))
    assert engine.stats.num_finished_requests == 2 * len(PROMPTS)
    assert engine.stats.num_generated_tokens == 12 * len(PROMPTS)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_preemption_repeats_nothing(pooling: str) -> None:
    """A request that came before takes the blocks of a prompt that was read in part."""
    engine = Engine(HiddenHashModel(num_blocks=8, block_size=4), SchedulerOptions(max_num_batched_tokens=2))
    engine.add_request("first", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=24))
    engine.step()
    engine.step()
    prompt = list(range(26))
    engine.add_embedding("e", prompt, pooling, normalize=False)
    output = run(engine)["e"]
    assert isinstance(output, EmbeddingOutput) and output.metrics.num_preemptions > 0
    assert np.array_equal(output.embedding, expected(prompt, pooling, False))


def test_urgent_ones_go_first() -> None:
    engine = Engine(HiddenHashModel(), SchedulerOptions(max_num_seqs=1, policy="priority"))
    for name, priority in (("late", 2), ("soon", 1), ("now", 0)):
        engine.add_embedding(name, [1, 2, 3], priority=priority)
    assert list(run(engine)) == ["now", "soon", "late"]


def test_abort_frees_the_blocks() -> None:
    engine = Engine(HiddenHashModel(), SchedulerOptions(max_num_batched_tokens=4))
    engine.add_embedding("x", list(range(20)), "mean")
    engine.step()
    assert engine.stats.kv_blocks_used > 0
    output = engine.abort("x")
    assert isinstance(output, EmbeddingOutput) and output.embedding.shape == (0,) and output.error is None
    assert engine.stats.num_aborted_requests == 1
    engine.check_integrity()
    assert run(engine) == {}


def test_failures_stay_with_their_request() -> None:
    model = HiddenHashModel()

    def spoil(context: list[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.full_like(logits, np.nan) if context[:2] == [9, 9] else logits

    model.transform = spoil
    engine = Engine(model)
    engine.add_embedding("bad", [9, 9, 1], "mean")
    engine.add_embedding("good", [1, 2, 3], "mean")
    outputs = run(engine)
    assert isinstance(outputs["bad"].error, BackendError)
    assert "the model's hidden states after 3 tokens are not finite" in str(outputs["bad"].error)
    assert outputs["good"].error is None


def test_a_failing_step_ends_the_embeddings_and_nothing_else() -> None:
    class Failing(HiddenHashModel):
        def hidden_states(self, batch: StepBatch) -> NDArray[np.float32]:
            raise BackendError("out of order")

    model = Failing()
    engine = Engine(model)
    engine.add_embedding("e", [1, 2, 3])
    engine.add_request("g", [1, 2, 3], GREEDY)
    with pytest.raises(BackendError, match="out of order"):
        engine.step()
    outputs = run(engine)
    assert str(outputs["e"].error) == "out of order"
    assert list(outputs["g"].outputs[0].token_ids) == model.greedy([1, 2, 3], 12)


def test_what_cannot_be_embedded_is_refused(hash_model: Any) -> None:
    with pytest.raises(RequestError, match="request x: this model gives no embeddings"):
        Engine(hash_model()).add_embedding("x", [1])
    engine = Engine(HiddenHashModel(num_blocks=4, block_size=4), max_model_len=20)
    with pytest.raises(ContextLengthError, match="21 tokens are more than the context of 20"):
        engine.add_embedding("x", [1] * 21)
    with pytest.raises(RequestError, match="17 tokens are more than the 16 that the whole KV cache holds"):
        engine.add_embedding("x", [1] * 17)
    assert len(embed(engine, [[1] * 16])) == 1
    with pytest.raises(RequestError, match="pooling is 'first'; expected one of: last, mean"):
        engine.add_embedding("x", [1], "first")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="normalize is 1"):
        engine.add_embedding("x", [1], "last", 1)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="token 50 at position 1"):
        engine.add_embedding("x", [1, 50])
    with pytest.raises(RequestError, match="no tokens"):
        engine.add_embedding("x", [])
    assert not engine.has_unfinished

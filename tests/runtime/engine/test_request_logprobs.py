"""Shapes and values of log-probabilities, of outputs and of prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inferencex.runtime.engine import scheduler
from inferencex.runtime.engine.engine import Engine
from inferencex.runtime.engine.scheduler import SchedulerOptions
from inferencex.runtime.outputs import RequestOutput, TokenLogprobs
from inferencex.runtime.params import SamplingParams

PROMPT = list(range(11))


class Recorder:
    """Keeps the logits that a model gave after each context."""

    def __init__(self, model: Any) -> None:
        self.logits: dict[tuple[int, ...], Any] = {}
        model.transform = self

    def __call__(self, context: list[int], logits: Any) -> Any:
        self.logits[tuple(context)] = logits.astype(np.float64)
        return logits

    def check(self, entry: TokenLogprobs, context: tuple[int, ...], chosen: int, count: int) -> None:
        logits = self.logits[context]
        expected = logits - np.log(np.exp(logits).sum())
        order = np.argsort(-expected)
        assert next(iter(entry)) == chosen
        assert set(entry) == {chosen, *order[:count].tolist()}
        for token_id, logprob in entry.items():
            assert logprob.logprob == pytest.approx(expected[token_id], abs=1e-5)
            assert logprob.rank == order.tolist().index(token_id) + 1


def ask(model: Any, options: SchedulerOptions | None = None, **fields: Any) -> RequestOutput:
    engine = Engine(model, options)
    output = None
    for _ in range(2):  # the second finds the first one's blocks
        engine.add_request("x", PROMPT, SamplingParams(max_tokens=5, **fields))
        while engine.has_unfinished:
            for delta in engine.step():
                output = delta.output or output
        engine.check_integrity()
    assert output is not None
    return output


@pytest.mark.parametrize("count", [0, 1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_output_logprobs(hash_model: Any, count: int, temperature: float) -> None:
    model = hash_model()
    recorder = Recorder(model)
    fields: dict[str, Any] = {"logit_bias": {3: 5.0}, "repetition_penalty": 1.3}
    output = ask(model, temperature=temperature, logprobs=count, **fields).outputs[0]
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids) == 5
    for index, (entry, token_id) in enumerate(zip(output.logprobs, output.token_ids, strict=True)):
        recorder.check(entry, (*PROMPT, *output.token_ids[:index]), token_id, count)
    total = sum(entry[token_id].logprob for entry, token_id in zip(output.logprobs, output.token_ids, strict=True))
    assert output.cumulative_logprob == pytest.approx(total)


def test_none_asked_for_none_given(hash_model: Any) -> None:
    output = ask(hash_model(), temperature=0.0)
    assert output.prompt_logprobs is None
    assert output.outputs[0].logprobs is None and output.outputs[0].cumulative_logprob is None


@pytest.mark.parametrize("chunk", [1, 3, 4, 64])
@pytest.mark.parametrize("count", [0, 2])
def test_prompt_logprobs_in_pieces_and_after_a_prefix_hit(hash_model: Any, chunk: int, count: int) -> None:
    model = hash_model()
    recorder = Recorder(model)
    options = SchedulerOptions(max_num_batched_tokens=chunk)
    output = ask(model, options, temperature=0.8, n=2, prompt_logprobs=count)
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(PROMPT)
    assert output.prompt_logprobs[0] is None
    for position, entry in enumerate(output.prompt_logprobs[1:], start=1):
        assert entry is not None
        recorder.check(entry, tuple(PROMPT[:position]), PROMPT[position], count)


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("start", [0, 1, 6, 9, 10, 40])
def test_prompt_logprobs_from_a_position_on(hash_model: Any, chunk: int, start: int) -> None:
    """What comes before is taken from the prefix cache, as far as it makes whole blocks of 4, and not reported."""
    model = hash_model()
    recorder = Recorder(model)
    options = SchedulerOptions(max_num_batched_tokens=chunk)
    output = ask(model, options, temperature=0.0, prompt_logprobs=0, prompt_logprobs_start=start)
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(PROMPT)
    for position, entry in enumerate(output.prompt_logprobs):
        assert (entry is None) == (position < max(start, 1))
        if entry is not None:
            recorder.check(entry, tuple(PROMPT[:position]), PROMPT[position], 0)
    assert output.num_cached_tokens == min(max(start - 1, 0), len(PROMPT) - 1) // 4 * 4
    rows = max(0, len(PROMPT) - max(start, 1))
    assert sum(len(batch.logit_rows) for batch in model.batches) == 2 * (rows + 5)


def test_a_step_returns_a_bounded_number_of_prompt_rows(hash_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hash_model()
    monkeypatch.setattr(scheduler, "_PROMPT_LOGPROB_BYTES", 4 * model.facts.vocab_size * 3)
    output = ask(model, temperature=0.0, prompt_logprobs=0)
    assert output.prompt_logprobs is not None and None not in output.prompt_logprobs[1:]
    assert max(len(batch.logit_rows) for batch in model.batches) == 3

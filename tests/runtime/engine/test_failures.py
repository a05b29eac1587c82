"""Requests that are refused, aborted, or end with an error leave the engine whole, and others alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inferencex.formats.errors import BackendError, OptionError, RequestError
from inferencex.runtime.engine.engine import Engine
from inferencex.runtime.engine.scheduler import SchedulerOptions
from inferencex.runtime.params import SamplingParams
from tests.runtime.conftest import HashModel
from tests.runtime.engine.runs import GREEDY, PROMPTS, run, serve


@pytest.mark.parametrize(
    ("prompt", "params", "numbers"),
    [
        ([1] * 30, SamplingParams(max_tokens=11), ["30", "11", "41", "40"]),
        ([1] * 40, SamplingParams(), ["40", "41"]),
        ([], GREEDY, ["no tokens"]),
        ([3, 50], GREEDY, ["50", "position 1"]),
        ([3, -1], GREEDY, ["-1"]),
        ([3], SamplingParams(logit_bias={50: 1.0}), ["logit_bias", "50"]),
        ([3], SamplingParams(stop_token_ids=[99]), ["stop_token_ids", "99"]),
        ([3], SamplingParams(logprobs=51), ["logprobs=51", "50"]),
        ([3], SamplingParams(stop="x"), ["tokenizer"]),
    ],
)
def test_requests_that_cannot_be_served_are_refused(
    hash_model: Any, prompt: list[int], params: SamplingParams, numbers: list[str]
) -> None:
    engine = Engine(hash_model(), max_model_len=40)
    with pytest.raises(RequestError) as caught:
        engine.add_request("bad", prompt, params)
    assert all(number in str(caught.value) for number in ["bad", *numbers]), caught.value
    assert not engine.has_unfinished


def test_a_request_larger_than_the_pool_is_refused(hash_model: Any) -> None:
    engine = Engine(hash_model(num_blocks=5, block_size=4))
    with pytest.raises(RequestError, match=r"10 prompt tokens \+ max_tokens=11 make 21 .* 20 .*5 blocks of 4"):
        engine.add_request("big", [1] * 10, SamplingParams(max_tokens=11))
    engine.add_request("fits", [1] * 10, SamplingParams(temperature=0.0, max_tokens=10))
    assert len(run(engine)["fits"].outputs[0].token_ids) == 10


def test_an_id_in_use_is_refused(hash_model: Any) -> None:
    engine = Engine(hash_model())
    engine.add_request("x", [1], GREEDY)
    with pytest.raises(RequestError, match="request x"):
        engine.add_request("x", [2], GREEDY)


def test_options_are_checked() -> None:
    with pytest.raises(OptionError, match="max_num_seqs=0"):
        SchedulerOptions(max_num_seqs=0)
    with pytest.raises(OptionError, match="scheduling_policy='random'"):
        SchedulerOptions(policy="random")  # type: ignore[arg-type]


def test_two_hundred_aborts_at_random_points_leave_the_pool_whole(hash_model: Any) -> None:
    random = np.random.default_rng(0)
    model = hash_model(num_blocks=24, block_size=4)
    engine = Engine(model, SchedulerOptions(max_num_batched_tokens=12, max_num_seqs=6))
    live: list[str] = []
    aborts = count = 0
    while aborts < 200:
        for _ in range(int(random.integers(0, 4))):
            prompt = random.integers(0, 3, size=int(random.integers(1, 30))).tolist()
            params = SamplingParams(
                temperature=1.0, n=int(random.integers(1, 4)), max_tokens=int(random.integers(1, 20))
            )
            engine.add_request(str(count), prompt, params)
            live.append(str(count))
            count += 1
        for delta in engine.step():
            if delta.output is not None:
                live.remove(delta.request_id)
        while live and random.random() < 0.6:
            name = live.pop(int(random.integers(len(live))))
            output = engine.abort(name)
            assert output is not None and "abort" in {o.finish_reason for o in output.outputs}
            assert engine.abort(name) is None
            aborts += 1
            engine.check_integrity()
    for name in live:
        engine.abort(name)
    engine.check_integrity()
    assert not engine.has_unfinished
    assert engine.scheduler.num_running == engine.scheduler.num_waiting == 0
    assert engine.scheduler.pool.num_free == 24
    assert serve(engine, PROMPTS) == [model.greedy(prompt, 12) for prompt in PROMPTS]


def test_an_exception_of_the_backend_ends_its_requests_and_frees_their_blocks(hash_model: Any) -> None:
    model = hash_model()
    engine = Engine(model, SchedulerOptions(max_num_seqs=2))
    for index in range(3):
        engine.add_request(str(index), PROMPTS[index], SamplingParams(temperature=0.5, n=2, max_tokens=5))
    engine.step()

    def explode(batch: Any) -> None:
        raise ZeroDivisionError("kernel")

    model.before_step = explode
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.check_integrity()
    assert engine.scheduler.num_running == 0
    model.before_step = None
    failed = [delta.output for delta in engine.step() if delta.output is not None and delta.output.error is not None]
    assert failed
    for output in failed:
        assert {o.finish_reason for o in output.outputs} <= {"error", "length"}
        assert "kernel" in str(output.error) and output.request_id in str(output.error)
    run(engine)
    assert serve(engine, PROMPTS) == [model.greedy(prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_fail_the_request_by_name(hash_model: Any, bad: float) -> None:
    model = hash_model()

    def spoil(context: list[int], logits: Any) -> Any:
        if context[0] == 13 and len(context) > 4:
            logits[17] = bad
        return logits

    model.transform = spoil
    engine = Engine(model)
    engine.add_request("sick", [13, 1], GREEDY)
    engine.add_request("sound", [1, 2], GREEDY)
    outputs = run(engine)
    assert outputs["sick"].outputs[0].finish_reason == "error"
    assert len(outputs["sick"].outputs[0].token_ids) == 3
    assert isinstance(outputs["sick"].error, BackendError)
    assert "sick" in str(outputs["sick"].error) and "not finite" in str(outputs["sick"].error)
    assert outputs["sound"].error is None
    assert list(outputs["sound"].outputs[0].token_ids) == model.greedy([1, 2], 12)
    assert engine.stats.num_failed_requests == 1


def test_logits_of_a_prompt_that_are_not_finite_fail_the_request(hash_model: Any) -> None:
    model = hash_model()
    model.transform = lambda context, logits: logits * np.float32(np.nan) if context == [1, 2] else logits
    engine = Engine(model)
    engine.add_request("x", [1, 2, 3, 4], SamplingParams(temperature=0.7, n=2, max_tokens=4, prompt_logprobs=0))
    output = run(engine)["x"]
    assert [(o.finish_reason, o.token_ids) for o in output.outputs] == [("error", ())] * 2
    assert "x" in str(output.error)


def test_logits_of_a_wrong_shape_are_refused() -> None:
    model: Any = HashModel()
    step = model.step
    model.step = lambda batch: step(batch)[:, :-1]
    engine = Engine(model)
    engine.add_request("x", [1], GREEDY)
    with pytest.raises(BackendError, match=r"\[1, 49\]; expected float32 \[1, 50\]"):
        engine.step()
    engine.check_integrity()

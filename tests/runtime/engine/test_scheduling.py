"""Who runs, who waits and who is preempted; preemption changes no output."""

from __future__ import annotations

from typing import Any

import pytest

from inferencex.runtime.engine.engine import Engine
from inferencex.runtime.engine.scheduler import SchedulerOptions
from inferencex.runtime.params import SamplingParams
from tests.runtime.engine.runs import GREEDY, PROMPTS, run, serve


@pytest.mark.parametrize("num_blocks", [9, 12, 16, 20])
@pytest.mark.parametrize("caching", [True, False])
def test_preemption_changes_nothing(hash_model: Any, num_blocks: int, caching: bool) -> None:
    model = hash_model(num_blocks=num_blocks, block_size=4)
    engine = Engine(model, SchedulerOptions(max_num_batched_tokens=16, enable_prefix_caching=caching))
    prompts = [[index, *range(index)] for index in range(1, 9)]
    assert serve(engine, prompts, SamplingParams(temperature=0.0, max_tokens=24)) == [
        model.greedy(prompt, 24) for prompt in prompts
    ]
    assert engine.stats.num_preemptions > 0
    assert engine.stats.kv_blocks_peak <= num_blocks


def test_preempted_sampling_is_reproducible(hash_model: Any) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=24, n=3)
    prompts = [[index, *range(index)] for index in range(1, 9)]
    results = []
    for num_blocks in (200, 9):
        engine = Engine(hash_model(num_blocks=num_blocks, block_size=4))
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), prompt, params)
        outputs = run(engine)
        results.append([[o.token_ids for o in outputs[str(index)].outputs] for index in range(len(prompts))])
        assert (engine.stats.num_preemptions > 0) == (num_blocks == 9)
    assert results[0] == results[1]


def test_priority_goes_first_and_takes_room(hash_model: Any) -> None:
    def order(policy: Any) -> list[str]:
        model = hash_model(num_blocks=8, block_size=4)
        engine = Engine(model, SchedulerOptions(policy=policy, max_num_seqs=2))
        for index, prompt in enumerate(PROMPTS[:4]):
            engine.add_request(f"late{index}", prompt[:8], GREEDY, priority=5)
        finished: list[str] = [d.request_id for d in engine.step() if d.output]
        urgent = SamplingParams(temperature=0.0, max_tokens=4)
        engine.add_request("urgent", [9, 8, 7, 6, 5], urgent, priority=-1)
        while engine.has_unfinished:
            for delta in engine.step():
                if delta.output is not None:
                    finished.append(delta.request_id)
                    prompt, count = list(delta.output.prompt_token_ids), 4 if delta.request_id == "urgent" else 12
                    assert list(delta.output.outputs[0].token_ids) == model.greedy(prompt, count)
            engine.check_integrity()
        return finished

    assert order("priority")[0] == "urgent"
    assert order("fcfs")[-1] == "urgent"


def test_a_sequence_that_lacks_a_block_waits_with_what_it_has(hash_model: Any) -> None:
    model = hash_model(num_blocks=5, block_size=4)
    engine = Engine(model)
    engine.add_request("first", [1] * 8, SamplingParams(temperature=0.0, max_tokens=4))
    engine.add_request("second", [2] * 8, GREEDY)
    outputs = run(engine)
    assert list(outputs["second"].outputs[0].token_ids) == model.greedy([2] * 8, 12)
    assert engine.stats.num_preemptions == 0
    assert model.num_computed == 8 + 3 + 8 + 11


def test_nobody_is_preempted_in_vain(hash_model: Any) -> None:
    """A more urgent request that would not fit in the place of all less urgent ones waits."""
    model = hash_model(num_blocks=10, block_size=4)
    engine = Engine(model, SchedulerOptions(policy="priority"))
    short = SamplingParams(temperature=0.0, max_tokens=3)
    engine.add_request("large", [1] * 22, short, priority=0)
    engine.add_request("small", [2] * 6, short, priority=5)
    engine.step()
    engine.add_request("urgent", [3] * 18, short, priority=1)
    engine.step()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (2, 1)
    run(engine)
    assert engine.stats.num_preemptions == 0


def test_a_steady_stream_of_requests_starves_nobody(hash_model: Any) -> None:
    """A long prompt at the head of the queue is not overtaken for ever by short ones that would fit."""
    engine = Engine(hash_model(num_blocks=10, block_size=4), SchedulerOptions(max_num_seqs=4))
    engine.add_request("first", [1] * 8, GREEDY)
    engine.step()
    engine.add_request("long", list(range(36)), SamplingParams(temperature=0.0, max_tokens=4))
    for index in range(200):
        engine.add_request(f"short{index}", [index % 7, 3], GREEDY)
        if any(delta.request_id == "long" and delta.output for delta in engine.step()):
            break
    else:
        pytest.fail("the long request was never served")
    run(engine)

"""Outputs do not depend on how the work was cut, shared or mixed, and end where they should."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inferencex.runtime.engine.engine import Engine
from inferencex.runtime.engine.prefix_cache import BlockKey
from inferencex.runtime.engine.scheduler import SchedulerOptions
from inferencex.runtime.params import SamplingParams
from tests.runtime.engine.runs import GREEDY, PROMPTS, run, serve


def test_alone_equals_among_others(hash_model: Any) -> None:
    model = hash_model()
    expected = [model.greedy(prompt, 12) for prompt in PROMPTS]
    assert [serve(Engine(hash_model()), [prompt])[0] for prompt in PROMPTS] == expected
    assert serve(Engine(hash_model()), PROMPTS) == expected


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7, 16, 64])
def test_chunking_changes_nothing(hash_model: Any, chunk: int) -> None:
    model = hash_model()
    engine = Engine(model, SchedulerOptions(max_num_batched_tokens=chunk, max_num_seqs=4))
    assert serve(engine, PROMPTS) == [model.greedy(prompt, 12) for prompt in PROMPTS]
    assert max(len(batch.token_ids) for batch in model.batches) <= chunk
    assert max(len(batch.context_lengths) for batch in model.batches) <= 4


@pytest.mark.parametrize("length", [6, 8, 12, 13, 16])
def test_prefix_hits_change_nothing(hash_model: Any, length: int) -> None:
    """Hits that end inside a block, on a block's border, and that would cover the whole prompt."""
    model = hash_model(block_size=4)
    engine = Engine(model)
    prompt = list(range(length))
    first = serve(engine, [prompt])
    before = model.num_computed
    engine.add_request("again", prompt, GREEDY)
    again = run(engine)["again"]
    assert [list(again.outputs[0].token_ids)] == first == [model.greedy(prompt, 12)]
    assert again.num_cached_tokens == (length - 1) // 4 * 4
    assert model.num_computed - before == length - again.num_cached_tokens + 11
    longer = [*prompt[:6], 30, 31, 32]
    assert serve(engine, [longer]) == [model.greedy(longer, 12)]


def test_generated_tokens_are_found_by_the_next_turn(hash_model: Any) -> None:
    model = hash_model(block_size=4)
    engine = Engine(model)
    [answer] = serve(engine, [PROMPTS[2]])
    engine.add_request("next", [*PROMPTS[2], *answer, 3, 4], GREEDY)
    assert run(engine)["next"].num_cached_tokens == (len(PROMPTS[2]) + 11) // 4 * 4


def test_prefix_caching_can_be_off(hash_model: Any) -> None:
    model = hash_model()
    engine = Engine(model, SchedulerOptions(enable_prefix_caching=False))
    for _ in range(2):
        engine.add_request("x", PROMPTS[2], GREEDY)
        assert run(engine)["x"].num_cached_tokens == 0


def test_a_hash_collision_is_no_hit(hash_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockKey, "__hash__", lambda self: 0)
    model = hash_model()
    engine = Engine(model)
    prompts = [[a, b, 2, 3, c, 5, 6, 7, 8] for a in (0, 1) for b in (1, 9) for c in (4, 8)]
    assert hash(BlockKey(0, (1,))) == hash(BlockKey(5, (2,)))
    for _ in range(2):
        for prompt in prompts:
            assert serve(engine, [prompt]) == [model.greedy(prompt, 12)]


def test_state_that_depends_on_the_prompt_length_is_not_shared(hash_model: Any) -> None:
    model = hash_model(block_size=4, length_independent_up_to=16)
    engine = Engine(model)
    cached = []
    for index, length in enumerate((12, 16, 17, 17, 21)):
        engine.add_request(str(index), list(range(length)), GREEDY)
        cached.append(run(engine)[str(index)].num_cached_tokens)
    assert cached == [0, 12, 0, 16, 0]


def test_n_continuations_share_the_prompt(hash_model: Any) -> None:
    for caching in (True, False):
        model = hash_model(block_size=4)
        engine = Engine(model, SchedulerOptions(enable_prefix_caching=caching))
        prompt = list(range(40))
        engine.add_request("x", prompt, SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=6))
        output = run(engine)["x"]
        assert len({o.token_ids for o in output.outputs}) == 4
        assert [o.index for o in output.outputs] == [0, 1, 2, 3]
        # The prompt once, its last block for each of the others, and what was generated.
        assert model.num_computed == 40 + 3 * 4 + 4 * 5
        assert engine.stats.kv_blocks_peak <= 9 + 4 * 3


def test_n_continuations_when_the_first_ends_at_once(hash_model: Any) -> None:
    engine = Engine(hash_model())
    engine.add_request("x", [1, 2, 3], SamplingParams(n=3, temperature=2.0, seed=1, max_tokens=1))
    output = run(engine)["x"]
    assert [len(o.token_ids) for o in output.outputs] == [1, 1, 1]


def test_max_tokens_defaults_to_what_fits(hash_model: Any) -> None:
    engine = Engine(hash_model(num_blocks=64, block_size=4), max_model_len=40)
    engine.add_request("context", [1, 2, 3], SamplingParams(temperature=0.0))
    engine.add_request("one token left", [1] * 39, SamplingParams(temperature=0.0))
    outputs = run(engine)
    assert len(outputs["context"].outputs[0].token_ids) == 37
    assert len(outputs["one token left"].outputs[0].token_ids) == 1
    engine = Engine(hash_model(num_blocks=5, block_size=4), max_model_len=400)
    engine.add_request("pool", [1, 2, 3], SamplingParams(temperature=0.0))
    assert len(run(engine)["pool"].outputs[0].token_ids) == 17
    defaults = SamplingParams(max_tokens=9)
    engine = Engine(hash_model(), default_params=defaults, max_model_len=20)
    engine.add_request("default", [1], SamplingParams(temperature=0.0))
    engine.add_request("cut default", [1] * 15, SamplingParams(temperature=0.0))
    outputs = run(engine)
    assert [len(outputs[name].outputs[0].token_ids) for name in ("default", "cut default")] == [9, 5]


def test_stop_tokens_and_end_of_sequence(hash_model: Any) -> None:
    model = hash_model()
    answer = model.greedy([1, 2], 12)
    end = answer[5]
    first = answer.index(end)

    def ask(**fields: Any) -> Any:
        engine = Engine(hash_model(), eos_token_ids=[end])
        engine.add_request("x", [1, 2], SamplingParams(temperature=0.0, max_tokens=12, **fields))
        return run(engine)["x"].outputs[0]

    ended = ask()
    assert list(ended.token_ids) == answer[: first + 1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
    ignored = ask(ignore_eos=True)
    assert list(ignored.token_ids) == answer
    assert (ignored.finish_reason, ignored.stop_reason) == ("length", None)
    stopped = ask(ignore_eos=True, stop_token_ids=[answer[2]])
    assert list(stopped.token_ids) == answer[: answer.index(answer[2]) + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", answer[2])
    late = ask(min_tokens=9)
    assert len(late.token_ids) >= 9
    assert end not in late.token_ids[:9]


def test_logits_are_not_read_after_the_next_step_began(hash_model: Any) -> None:
    params = SamplingParams(temperature=0.7, seed=2, n=2, max_tokens=6, logprobs=2, prompt_logprobs=1)
    outputs = []
    for reuses_buffer in (False, True):
        model = hash_model()
        step, buffer = model.step, np.empty((64, 50), dtype=np.float32)

        def overwrite(batch: Any, step: Any = step, buffer: Any = buffer) -> Any:
            buffer[:] = np.nan
            logits = buffer[: len(batch.logit_rows)]
            logits[:] = step(batch)
            return logits

        if reuses_buffer:
            model.step = overwrite
        engine = Engine(model, SchedulerOptions(max_num_batched_tokens=5))
        for index, prompt in enumerate(PROMPTS):
            engine.add_request(str(index), prompt, params)
        outputs.append({name: (o.outputs, o.prompt_logprobs) for name, o in run(engine).items()})
    assert outputs[0] == outputs[1]
    assert "nan" not in str(outputs[1])


def test_times_and_totals(hash_model: Any) -> None:
    ticks = iter(range(10_000))
    engine = Engine(hash_model(), clock=lambda: float(next(ticks)))
    engine.add_request("x", [1, 2, 3], GREEDY)
    metrics = run(engine)["x"].metrics
    assert metrics.queue_seconds is not None and metrics.time_to_first_token is not None
    assert 0 < metrics.queue_seconds < metrics.time_to_first_token
    assert metrics.decode_tokens_per_second is not None and metrics.decode_tokens_per_second > 0
    assert metrics.num_generated_tokens == 12
    stats = engine.stats
    assert (stats.num_prefill_tokens, stats.num_decode_tokens, stats.num_generated_tokens) == (3, 11, 12)
    assert stats.prefill_tokens_per_second and stats.decode_tokens_per_second
    assert stats.mean_time_to_first_token == metrics.time_to_first_token
    assert (stats.num_finished_requests, stats.kv_blocks_peak, stats.num_kv_blocks) == (1, 4, 64)


def test_seeds(hash_model: Any) -> None:
    seeded = SamplingParams(temperature=1.0, seed=11, n=3, max_tokens=10)
    unseeded = SamplingParams(temperature=1.0, max_tokens=10)

    def answers(others: int, first: bool, chunk: int) -> list[tuple[int, ...]]:
        engine = Engine(hash_model(num_blocks=300), SchedulerOptions(max_num_batched_tokens=chunk, max_num_seqs=32))
        if first:
            engine.add_request("x", [1, 2, 3], seeded)
        for index in range(others):
            engine.add_request(str(index), [1, 2, 3], unseeded if index % 2 else seeded)
        if not first:
            engine.add_request("x", [1, 2, 3], seeded)
        outputs = run(engine)
        assert len({outputs[str(index)].outputs[0].token_ids for index in range(1, others, 2)}) == others // 2
        return [output.token_ids for output in outputs["x"].outputs]

    alone = answers(0, True, 100)
    assert len(set(alone)) == 3
    assert answers(0, True, 100) == alone
    assert answers(9, True, 100) == alone
    assert answers(9, False, 7) == alone

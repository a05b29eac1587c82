"""Outputs do not depend on how the work was cut, shared, interrupted or mixed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from inferencex.formats.errors import BackendError, OptionError, RequestError
from inferencex.runtime.engine.engine import Engine
from inferencex.runtime.engine.prefix_cache import BlockKey
from inferencex.runtime.engine.scheduler import SchedulerOptions
from inferencex.runtime.outputs import RequestOutput
from inferencex.runtime.params import SamplingParams
from tests.runtime.conftest import HashModel

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = [[7], [1, 2, 3], list(range(20)), [5, 4, 3, 2, 1] * 5, list(range(16)), list(range(17))]


def run(engine: Engine) -> dict[str, RequestOutput]:
    outputs = {}
    while engine.has_unfinished:
        for delta in engine.step():
            if delta.output is not None:
                outputs[delta.request_id] = delta.output
        engine.check_integrity()
    assert engine.stats.kv_blocks_used == 0
    return outputs


def serve(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    outputs = run(engine)
    return [list(outputs[str(index)].outputs[0].token_ids) for index in range(len(prompts))]


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


def test_logits_of_a_wrong_shape_are_refused() -> None:
    model: Any = HashModel()
    step = model.step
    model.step = lambda batch: step(batch)[:, :-1]
    engine = Engine(model)
    engine.add_request("x", [1], GREEDY)
    with pytest.raises(BackendError, match=r"\[1, 49\]; expected float32 \[1, 50\]"):
        engine.step()
    engine.check_integrity()


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

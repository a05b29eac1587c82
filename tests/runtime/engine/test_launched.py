"""Steps are launched before the tokens of the last are known, and nothing shows of it but the order of calls."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from inferencex.formats.errors import BackendError
from inferencex.runtime.engine.engine import Engine
from inferencex.runtime.params import SamplingParams
from tests.runtime.conftest import Launched, LaunchingHashModel
from tests.runtime.engine.runs import GREEDY, PROMPTS, run, serve


def test_tokens_of_a_wrong_shape_are_refused() -> None:
    model = LaunchingHashModel()
    launch = model.launch

    def with_one_more(*arguments: Any) -> Launched:
        launched = launch(*arguments)
        launched.tokens.append(0)
        return launched

    model.launch = with_one_more  # type: ignore[method-assign]
    engine = Engine(model)
    engine.add_request("x", [1], GREEDY)
    with pytest.raises(BackendError, match=r"int32 \[2\]; expected int32 \[1\]"):
        engine.step()
    engine.check_integrity()


def test_the_next_step_is_launched_before_the_tokens_of_the_last_are_asked_for() -> None:
    """Two prompts decode: every step but those that admit is launched while the one before it is open."""
    events: list[str] = []

    class Recorded(Launched):
        def __init__(self, tokens: list[int], name: str) -> None:
            super().__init__(tokens)
            self.name = name

        def result(self) -> Any:
            if sys._getframe(1).f_code.co_name == "_finish_launched":
                events.append(f"result {self.name}")
            return super().result()

    class Recording(LaunchingHashModel):
        count = 0

        def launch(self, batch: Any, draws: Any, previous: Any = None, rows: Any = None) -> Launched:
            name = str(self.count)
            self.count += 1
            events.append(f"launch {name}")
            return Recorded(super().launch(batch, draws, previous, rows).tokens, name)

    model = Recording()
    engine = Engine(model)
    assert serve(engine, PROMPTS[:2]) == [model.greedy(prompt, 12) for prompt in PROMPTS[:2]]
    expected = ["launch 0"]
    for step in range(1, 12):
        expected += [f"launch {step}", f"result {step - 1}"]
    assert events == [*expected, "result 11"]


def test_what_ended_is_dropped_from_the_steps_behind_it() -> None:
    """A stop token ends one of two sequences when its next step runs already; the other goes on as if alone."""
    model = LaunchingHashModel()
    expected = [model.greedy(prompt, 12) for prompt in PROMPTS[:2]]
    stop = expected[0][3]
    engine = Engine(model)
    first = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(stop,))
    engine.add_request("0", PROMPTS[0], first)
    engine.add_request("1", PROMPTS[1], GREEDY)
    outputs = run(engine)
    kept = expected[0].index(stop) + 1
    assert list(outputs["0"].outputs[0].token_ids) == expected[0][:kept]
    assert list(outputs["1"].outputs[0].token_ids) == expected[1]


@pytest.mark.parametrize("step", range(4))
def test_a_step_that_fails_behind_another_ends_only_its_requests(step: int) -> None:
    """The request is reported whether the step fails by itself, behind one of the same call, or behind an earlier."""
    model = LaunchingHashModel()
    engine = Engine(model)
    engine.add_request("x", PROMPTS[1], GREEDY)
    launched = 0

    def fail(batch: Any) -> None:
        nonlocal launched
        launched += 1
        if launched > step:
            raise BackendError("the device was lost")

    model.before_step = fail
    with pytest.raises(BackendError, match="the device was lost"):
        for _ in range(step + 1):
            engine.step()
    model.before_step = None
    assert [delta.finish_reason for delta in engine.step()] == ["error"]
    engine.check_integrity()
    assert engine.stats.kv_blocks_used == 0
    assert serve(engine, [PROMPTS[2]]) == [model.greedy(PROMPTS[2], 12)]

"""Random requests, steps and aborts under random limits: outputs stay right and blocks are conserved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inferencex.runtime.engine.engine import Engine
from inferencex.runtime.engine.scheduler import SchedulerOptions
from inferencex.runtime.outputs import CompletionDelta
from inferencex.runtime.params import SamplingParams


class EngineMachine(RuleBasedStateMachine):
    model_class: Any

    @initialize(
        num_blocks=st.integers(6, 20),
        block_size=st.integers(1, 5),
        tokens=st.integers(1, 20),
        seqs=st.integers(1, 6),
        caching=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
    )
    def build(self, num_blocks: int, block_size: int, tokens: int, seqs: int, caching: bool, policy: Any) -> None:
        self.model = self.model_class(num_blocks=num_blocks, block_size=block_size, vocab_size=17)
        self.engine = Engine(self.model, SchedulerOptions(seqs, tokens, caching, policy))
        self.capacity = num_blocks * block_size
        self.streamed: dict[tuple[str, int], list[int]] = {}
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.count = 0

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        new_tokens=st.integers(1, 12),
        n=st.integers(1, 3),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        priority=st.integers(0, 2),
    )
    def add(self, prompt: list[int], new_tokens: int, n: int, prompt_logprobs: int | None, priority: int) -> None:
        if len(prompt) + new_tokens > self.capacity:
            return
        name = str(self.count)
        self.count += 1
        # A temperature just above greedy: n > 1 is allowed, and every choice is the most likely token.
        params = SamplingParams(
            n=n, temperature=1e-4 if n > 1 else 0.0, top_k=1, max_tokens=new_tokens, prompt_logprobs=prompt_logprobs
        )
        self.engine.add_request(name, prompt, params, priority=priority)
        self.prompts[name] = (prompt, new_tokens)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            for delta in self.engine.step():
                self.check(delta)

    @precondition(lambda self: self.prompts)
    @rule(choose=st.randoms(use_true_random=False))
    def abort(self, choose: Any) -> None:
        name = choose.choice(sorted(self.prompts))
        prompt, count = self.prompts.pop(name)
        output = self.engine.abort(name)
        assert output is not None
        expected = self.model.greedy(prompt, count)
        for completion in output.outputs:
            assert list(completion.token_ids) == expected[: len(completion.token_ids)]

    def check(self, delta: CompletionDelta) -> None:
        self.streamed.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
        if delta.output is None:
            return
        prompt, count = self.prompts.pop(delta.request_id)
        expected = self.model.greedy(prompt, count)
        for completion in delta.output.outputs:
            assert list(completion.token_ids) == expected == self.streamed[delta.request_id, completion.index]
            assert completion.finish_reason == "length"
        assert delta.output.prompt_logprobs is None or None not in delta.output.prompt_logprobs[1:]

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()
            options = self.engine.options
            assert self.engine.scheduler.num_running <= min(options.max_num_seqs, options.max_num_batched_tokens)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        work = sum(len(prompt) + count for prompt, count in self.prompts.values())
        for _ in range(50 + 40 * work):
            if not self.engine.has_unfinished:
                break
            for delta in self.engine.step():
                self.check(delta)
        assert not self.engine.has_unfinished, "requests that never finish"
        self.engine.check_integrity()
        assert self.engine.scheduler.pool.num_free == self.engine.scheduler.pool.num_blocks


@pytest.fixture(autouse=True)
def _model(hash_model: Any) -> None:
    EngineMachine.model_class = hash_model


TestEngineMachine: Callable[..., Any] = EngineMachine.TestCase
TestEngineMachine.settings = settings(  # type: ignore[attr-defined]
    max_examples=60, stateful_step_count=30, deadline=None
)

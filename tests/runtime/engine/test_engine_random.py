"""Random requests, steps and aborts under random limits: outputs stay right and blocks are conserved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inferencex.runtime.backends.base import StepBatch
from inferencex.runtime.engine.engine import Engine
from inferencex.runtime.engine.scheduler import SchedulerOptions
from inferencex.runtime.outputs import CompletionDelta, EmbeddingOutput
from inferencex.runtime.params import SamplingParams
from tests.runtime.conftest import HashModel, LaunchingHashModel, hash_logits
from tests.runtime.engine.constraints import Script

VOCAB = 17


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
        self.model = self.model_class(num_blocks=num_blocks, block_size=block_size, vocab_size=VOCAB)
        self.engine = Engine(self.model, SchedulerOptions(seqs, tokens, caching, policy))
        self.capacity = num_blocks * block_size
        self.streamed: dict[tuple[str, int], list[int]] = {}
        self.expected: dict[str, tuple[list[int], str]] = {}
        self.embedded: dict[str, list[int]] = {}
        self.count = 0

    def name(self) -> str:
        self.count += 1
        return str(self.count - 1)

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
        name = self.name()
        # A temperature just above greedy: n > 1 is allowed, and every choice is the most likely token.
        params = SamplingParams(
            n=n, temperature=1e-4 if n > 1 else 0.0, top_k=1, max_tokens=new_tokens, prompt_logprobs=prompt_logprobs
        )
        self.engine.add_request(name, prompt, params, priority=priority)
        self.expected[name] = (self.model.greedy(prompt, new_tokens), "length")

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        allowed=st.lists(st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=9), min_size=1, max_size=8),
        n=st.integers(1, 2),
        priority=st.integers(0, 2),
    )
    def constrain(self, prompt: list[int], allowed: list[set[int]], n: int, priority: int) -> None:
        if len(prompt) + len(allowed) > self.capacity:
            return
        name = self.name()
        params = SamplingParams(n=n, temperature=1e-4 if n > 1 else 0.0, top_k=1, max_tokens=len(allowed))
        self.engine.add_request(
            name, prompt, params, priority=priority, constraint=lambda: Script(allowed, vocab_size=VOCAB)
        )
        tokens: list[int] = []
        for choice in allowed:
            logits = hash_logits([*prompt, *tokens], VOCAB)
            tokens.append(max(sorted(choice), key=lambda token: logits[token]))
        self.expected[name] = (tokens, "stop")

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        pooling=st.sampled_from(["last", "mean"]),
        priority=st.integers(0, 2),
    )
    def embed(self, prompt: list[int], pooling: Any, priority: int) -> None:
        if len(prompt) > self.capacity:
            return
        name = self.name()
        self.engine.add_embedding(name, prompt, pooling, False, priority=priority)
        self.embedded[name] = prompt if pooling == "mean" else []

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            for delta in self.engine.step():
                self.check(delta)

    @precondition(lambda self: self.expected or self.embedded)
    @rule(choose=st.randoms(use_true_random=False))
    def abort(self, choose: Any) -> None:
        name = choose.choice(sorted([*self.expected, *self.embedded]))
        output = self.engine.abort(name)
        assert output is not None
        self.embedded.pop(name, None)
        expected, _ = self.expected.pop(name, ([], ""))
        for completion in output.outputs:
            assert list(completion.token_ids) == expected[: len(completion.token_ids)]

    def check(self, delta: CompletionDelta) -> None:
        self.streamed.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
        if delta.output is None:
            return
        if isinstance(delta.output, EmbeddingOutput):
            self.check_embedding(delta.output)
            return
        expected, reason = self.expected.pop(delta.request_id)
        for completion in delta.output.outputs:
            assert list(completion.token_ids) == expected == self.streamed[delta.request_id, completion.index]
            assert completion.finish_reason == reason
        assert delta.output.prompt_logprobs is None or None not in delta.output.prompt_logprobs[1:]

    def check_embedding(self, output: EmbeddingOutput) -> None:
        meant, prompt = self.embedded.pop(output.request_id), output.prompt_token_ids
        rows = [hash_logits(prompt[: i + 1], VOCAB) for i in range(0 if meant else len(prompt) - 1, len(prompt))]
        mean = sum((row.astype(np.float64) for row in rows), np.zeros(VOCAB)) / len(rows)
        assert np.array_equal(output.embedding, mean.astype(np.float32))

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()
            options = self.engine.options
            assert self.engine.scheduler.num_running <= min(options.max_num_seqs, options.max_num_batched_tokens)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        work = sum(24 + len(tokens) for tokens, _ in self.expected.values()) + 24 * len(self.embedded)
        for _ in range(50 + 40 * work):
            if not self.engine.has_unfinished:
                break
            for delta in self.engine.step():
                self.check(delta)
        assert not self.engine.has_unfinished, "requests that never finish"
        self.engine.check_integrity()
        assert self.engine.scheduler.pool.num_free == self.engine.scheduler.pool.num_blocks


class Embedding:
    hidden_size = VOCAB

    def hidden_states(self, batch: StepBatch) -> Any:
        return self.step(batch)  # type: ignore[attr-defined]


class EmbeddingHashModel(Embedding, HashModel): ...


class EmbeddingLaunchingHashModel(Embedding, LaunchingHashModel): ...


class StepsMachine(EngineMachine):
    model_class = EmbeddingHashModel


class LaunchesMachine(EngineMachine):
    model_class = EmbeddingLaunchingHashModel


TestSteps: Callable[..., Any] = StepsMachine.TestCase
TestLaunches: Callable[..., Any] = LaunchesMachine.TestCase
for machine in (TestSteps, TestLaunches):
    machine.settings = settings(  # type: ignore[attr-defined]
        max_examples=60, stateful_step_count=30, deadline=None
    )

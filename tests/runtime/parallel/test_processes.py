"""Ranks in processes of their own compute what one process does, and end when they are closed."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferencex.formats.errors import BackendError
from inferencex.runtime import LLM, SamplingParams
from inferencex.runtime.backends.base import Float32Array
from inferencex.runtime.backends.cpu import CpuBackend
from inferencex.runtime.parallel.backend import ParallelBackend
from inferencex.runtime.parallel.executable import ParallelExecutable
from tests.architectures.ragged import last_logits, ragged_logits, random_sequences
from tests.runtime.parallel.conftest import OPTIONS, THREE, MakeBundle
from tests.runtime.parallel.endings import ends, prompt_batch
from tests.runtime.parallel.ranks import EVERYTHING

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize(
    ("name", "size", "overrides"),
    [("llama", 2, {}), ("llama", 3, THREE), ("mixtral", 2, {})],
    ids=lambda value: str(value),
)
def test_answers_are_those_of_one_process(
    make_bundle: MakeBundle, name: str, size: int, overrides: dict[str, Any]
) -> None:
    """In pieces of prompts, with beginnings of prompts in the cache."""
    bundle = make_bundle(name, **overrides)
    beginning = random_sequences(250, [19], seed=3)[0]
    prompts = [*random_sequences(250, [5, 30, 17]), [*beginning, 1, 2], [*beginning, 3]]
    settings: dict[str, Any] = {"num_kv_blocks": 32, "block_size": 4, "max_num_batched_tokens": 16, "threads": size}
    with LLM(bundle, backend=CpuBackend(), **settings) as alone:
        expected = answers(alone, prompts)
    with LLM(bundle, backend=ParallelBackend(CpuBackend(), size, EVERYTHING), **settings) as together:
        assert answers(together, prompts) == expected
        assert answers(together, prompts[::-1]) == expected[::-1]
        assert together.generate(prompts[1], GREEDY)[0].num_cached_tokens > 0
        together.engine.check_integrity()


def test_logits_and_hidden_states_are_those_of_one_process(
    make_bundle: MakeBundle, running: ParallelExecutable
) -> None:
    alone = CpuBackend().compile(make_bundle("llama"), OPTIONS)
    sequences = random_sequences(250)
    for ours, theirs in zip(ragged_logits(running, sequences), ragged_logits(alone, sequences), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    hidden = [_hidden(executable) for executable in (running, alone)]
    assert hidden[0].shape == (1, running.hidden_size)
    np.testing.assert_allclose(hidden[0], hidden[1], atol=1e-4)


def _hidden(executable: Any) -> Float32Array:
    return executable.hidden_states(prompt_batch()).copy()  # type: ignore[no-any-return]


def test_one_logit_row_and_none(running: ParallelExecutable) -> None:
    assert last_logits(running, random_sequences(250)[-1]).shape == (1, running.facts.vocab_size)


def test_a_fork_that_ends_leaves_the_ranks_alone(running: ParallelExecutable) -> None:
    """Also one that runs what is to be done at exit, as `multiprocessing` and `os.fork` in a script do."""
    ended = running._finalizer
    child = os.fork()
    if child == 0:
        try:
            ended()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    running.step(prompt_batch())
    assert running._finalizer.alive


def test_closing_ends_the_others(make_bundle: MakeBundle) -> None:
    llm = LLM(make_bundle("llama"), backend=ParallelBackend(CpuBackend(), 2, EVERYTHING), num_kv_blocks=8)
    executable = llm.engine.executable
    assert isinstance(executable, ParallelExecutable)
    llm.close()
    assert all(ends(process_id) for process_id in executable.process_ids)
    with pytest.raises(BackendError, match="was closed"):
        executable.step(prompt_batch())


def test_dropping_it_ends_the_others(make_bundle: MakeBundle) -> None:
    executable = ParallelBackend(CpuBackend(), 2, EVERYTHING).compile(make_bundle("llama"), OPTIONS)
    process_ids = executable.process_ids
    del executable
    assert all(ends(process_id) for process_id in process_ids)


def test_nothing_is_left_on_disk_while_ranks_run(
    make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Who is killed removes nothing."""
    bundle = make_bundle("llama")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    executable = ParallelBackend(CpuBackend(), 2, EVERYTHING).compile(bundle, OPTIONS)
    assert list(tmp_path.iterdir()) == []
    assert executable.step(prompt_batch()).shape == (1, executable.facts.vocab_size)
    executable.close()


def test_needs_are_those_of_all_ranks(make_bundle: MakeBundle) -> None:
    bundle = make_bundle("llama")
    options = replace(OPTIONS, kv_cache_memory=1 << 20)
    alone, together = (
        b.memory_needs(bundle, options) for b in (CpuBackend(), ParallelBackend(CpuBackend(), 2, EVERYTHING))
    )
    assert alone.weights < together.weights < 1.1 * alone.weights  # norms and tables of angles are on both
    assert together.state == alone.state

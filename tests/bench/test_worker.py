from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from bench import worker
from bench.columns import COLUMNS, capacity_for
from bench.worker import Job, decode_rate, prefill_rate


class Scripted:
    """A session whose steps take the time and make the tokens that the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: Sequence[tuple[float, tuple[int, ...]]]) -> None:
        self.now = 0.0
        self.steps = steps
        monkeypatch.setattr(worker.time, "perf_counter", lambda: self.now)

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Iterator[Sequence[int]]:
        for seconds, counts in self.steps:
            self.now += seconds
            yield counts


def test_prefill_ends_with_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Scripted(monkeypatch, [(1.0, (0,)), (1.0, (1,)), (8.0, (1,))])
    assert prefill_rate(session, range(100)) == pytest.approx(50.0)


def test_decode_counts_only_steps_in_which_all_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [(9.0, (1, 0)), (9.0, (2, 1)), (1.0, (3, 2)), (1.0, (4, 3)), (9.0, (4, 4))]
    session = Scripted(monkeypatch, steps)
    assert decode_rate(session, [[1], [2]], 4) == pytest.approx(4 / 2.0)


def test_sequences_that_never_decode_together_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Scripted(monkeypatch, [(1.0, (1, 0)), (1.0, (2, 0)), (1.0, (2, 1))])
    with pytest.raises(RuntimeError, match="no step decoded all 2 sequences"):
        decode_rate(session, [[1], [2]], 2)


def test_a_job_survives_the_command_line() -> None:
    column = COLUMNS["decode-8"]
    job = Job((column.name,), capacity_for([column], 2), "ids.json", 3, 60.0, 0.0)
    assert Job.parse(job.dump()) == job

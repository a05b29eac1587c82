"""What is compared with what, and the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.serve.load import Load
from bench.serve.report import HEADER, markdown, notes, rows, terminal_table
from bench.serve.results import Run, Served, ServerResult, spread


def served(rate: float, *, stream: bool = True, prompt: float = 128.0, output: float = 128.0) -> Served:
    times = (0.5, 0.9, 0.01, 0.02) if stream else (None,) * 4
    return Served(stream, rate, prompt, output, *times, latency_p50=2.0, client_share=0.03)


def result(*repetitions: Served) -> ServerResult:
    return ServerResult("1.0", "int4", "defaults", list(repetitions))


@pytest.fixture
def run() -> Run:
    ours = result(*(served(rate) for rate in (900, 950, 100)), served(980, stream=False))
    peer = result(served(300), served(310, stream=False))
    run = Run("2030-01-02", "python -m bench.serve", "a machine", "Python", "A model", Load(2))
    run.offline = [1000.0, 1010.0, 990.0]
    run.servers = {"inferencex": ours, "llama.cpp": peer}
    run.skipped = {"vllm": "No module named 'vllm'"}
    return run


def test_medians_are_compared_way_by_way(run: Run) -> None:
    assert run.offline_rate == 1000
    assert (run.of_offline(True), run.of_offline(False)) == (0.9, 0.98)
    assert run.times("llama.cpp", True) == 3.0
    assert run.times("llama.cpp", False) == pytest.approx(980 / 310)
    assert run.times("vllm", True) is None


def test_of_two_repetitions_the_lower_counts() -> None:
    median = result(served(1), served(2)).median(True)
    assert median is not None and median.output_tokens_per_second == 1
    assert result().median(True) is None and result(served(1)).median(False) is None


def test_nothing_is_compared_with_what_was_not_measured(run: Run) -> None:
    run.offline = []
    del run.servers["inferencex"]
    assert run.offline_rate is run.of_offline(True) is run.times("llama.cpp", True) is None
    assert [row[0] for row in rows(run)] == ["llama.cpp (int4), streamed", "llama.cpp (int4), not streamed"]


def test_rows(run: Run) -> None:
    offline, ours, _, peer, _ = rows(run)
    assert offline == ["our engine without a server", "1,000", "90% streamed, 98% not streamed", "–", "–", "–"]
    assert ours == ["inferencex (int4), streamed", "900", "–", "500 / 900", "10.0 / 20.0", "2.00"]
    assert peer[:3] == ["llama.cpp (int4), streamed", "300", "3.00x"]
    assert all(len(row) == len(HEADER) for row in rows(run))


def test_the_page_says_how_it_came_about(run: Run) -> None:
    run.servers["llama.cpp"].failure = "it ran out of memory"
    page = markdown(run)
    for fact in (
        *("python -m bench.serve", "a machine", "2 threads", "2030-01-02", "32 at a time, 128 tokens in and 128 out"),
        *("90% of the engine's own throughput", "vllm was left out: No module", "it ran out of memory", "2% apart"),
    ):
        assert fact in page, fact
    assert terminal_table(run).row_count == 5


def test_other_lengths_than_asked_for_are_said(run: Run) -> None:
    assert not any("counted" in note for note in notes(run))
    run.servers["llama.cpp"].served.append(served(300, prompt=129.0, output=100.0))
    assert "llama.cpp counted 129 tokens of a prompt and 100 of an answer on average." in notes(run)


def test_a_run_is_read_back_as_it_was_written(run: Run, tmp_path: Path) -> None:
    run.save(tmp_path / "run.json")
    assert Run.load_from(tmp_path / "run.json") == run


def test_spread() -> None:
    assert spread([90, 100, 110]) == pytest.approx(0.2)
    assert spread([]) == 0

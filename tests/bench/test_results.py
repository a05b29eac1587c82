from __future__ import annotations

from pathlib import Path

import pytest

from bench.columns import COLUMNS
from bench.limits import Limits
from bench.results import EngineResult, Run, best_peer, ratio
from bench.sampling import Figure


def result(**figures: float) -> EngineResult:
    named = {name.replace("_", "-"): Figure(value, 3, False) for name, value in figures.items()}
    return EngineResult("1.0", "int4", "defaults", named)


def run(**results: EngineResult) -> Run:
    limits = Limits("AVX2", 1e12, 3e10)
    return Run("2030-01-02", "python -m bench", "a machine", "Python", 2, limits, {"smollm2": dict(results)})


def test_a_rate_is_compared_with_the_highest_peer() -> None:
    results = {
        "inferencex": result(decode_1=300),
        "openvino": result(decode_1=100),
        "llama.cpp": result(decode_1=200),
        "vllm": result(decode_8=900),
    }
    best = best_peer(COLUMNS["decode-1"], results)
    assert best is not None and (best.engine, best.value) == ("llama.cpp", 200)
    assert ratio(COLUMNS["decode-1"], results) == pytest.approx(1.5)


@pytest.mark.parametrize("column", ["memory", "disk", "first-token"])
def test_a_cost_is_compared_with_the_lowest_peer(column: str) -> None:
    key = column.replace("-", "_")
    results = {"inferencex": result(**{key: 50}), "openvino": result(**{key: 400}), "vllm": result(**{key: 100})}
    assert ratio(COLUMNS[column], results) == pytest.approx(2.0)


def test_there_is_no_ratio_without_peers_or_without_us() -> None:
    assert ratio(COLUMNS["decode-1"], {"inferencex": result(decode_1=300)}) is None
    assert ratio(COLUMNS["decode-1"], {"openvino": result(decode_1=300)}) is None


def test_of_several_processes_the_best_figure_of_each_column_counts() -> None:
    first = result(decode_1=300, memory=70, disk=9)
    first.take_better(result(decode_1=200, memory=60, prefill_512=4))
    assert {name: figure.value for name, figure in first.figures.items()} == {
        "decode-1": 300,
        "memory": 60,
        "disk": 9,
        "prefill-512": 4,
    }
    assert first.failure is None
    failed = result()
    failed.failure = "out of memory"
    first.take_better(failed)
    assert first.failure == "out of memory"


def test_a_run_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    written = run(inferencex=result(decode_1=300), openvino=result(memory=5))
    written.save(tmp_path / "run.json")
    assert Run.load(tmp_path / "run.json") == written


def test_an_earlier_run_fills_only_what_is_missing() -> None:
    now = run(inferencex=result(decode_1=300))
    now.complete_from(run(inferencex=result(decode_1=1, memory=7), openvino=result(decode_1=200)))
    figures = now.models["smollm2"]["inferencex"].figures
    assert (figures["decode-1"].value, figures["memory"].value) == (300, 7)
    assert now.models["smollm2"]["openvino"].figures["decode-1"].value == 200

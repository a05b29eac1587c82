from __future__ import annotations

import pytest

from bench.columns import COLUMNS
from bench.engines import OURS
from bench.models import MODELS
from bench.report import header, markdown, notes, number, rows
from bench.results import EngineResult, Run
from bench.sampling import Figure
from tests.bench.test_results import result, run


@pytest.mark.parametrize(
    ("value", "text"), [(0.456, "0.46"), (9.99, "9.99"), (12.34, "12.3"), (1851.4, "1,851"), (123456.0, "123,456")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


@pytest.fixture
def measured() -> Run:
    return run(inferencex=result(prefill_512=1000, memory=100), openvino=result(prefill_512=500, memory=50))


def test_a_row_has_figures_ratio_limit_and_fraction(measured: Run) -> None:
    prefill, memory = rows(measured, "smollm2")
    limit = COLUMNS["prefill-512"].limit(MODELS["smollm2"], measured.limits)
    least = COLUMNS["memory"].limit(MODELS["smollm2"], measured.limits)
    assert limit is not None and least is not None
    assert prefill == ["prefill 512, tokens/s", "1,000", "500", "2.00x", number(limit), f"{1000 / limit:.0%}"]
    assert memory == ["peak resident memory, MB", "100", "50.0", "0.50x", number(least), f"{least / 100:.0%}"]
    assert header(measured.models["smollm2"])[1:3] == ["inferencex (int4)", "openvino (int4)"]


def test_what_an_engine_lacks_is_left_open(measured: Run) -> None:
    measured.models["smollm2"]["vllm"] = result(memory=900)
    prefill, memory = rows(measured, "smollm2")
    assert prefill[1:4] == ["1,000", "500", "–"]
    assert memory[3] == "900"


def test_the_page_says_how_it_came_about(measured: Run) -> None:
    measured.skipped["vllm"] = "it is not installed"
    page = markdown(measured)
    for fact in (
        "python -m bench",
        "a machine",
        "2 threads",
        "1.00 TOPS",
        "30.0 GB/s",
        "vllm was left out",
        "2030-01-02",
    ):
        assert fact in page
    tables = [line for line in page.splitlines() if line.startswith("| prefill")]
    assert tables and tables[0].count("|") == len(header(measured.models["smollm2"])) + 1


def test_doubtful_figures_and_failures_are_named(measured: Run) -> None:
    assert not any("~" in line for line in notes(measured))
    broken = EngineResult("1", "int4", "defaults", {"prefill-512": Figure(7, 1, True)}, failure="out of memory")
    measured.models["smollm2"]["llama.cpp"] = broken
    assert next(iter(rows(measured, "smollm2")))[3] == "7.00~"
    assert any("out of memory" in line for line in notes(measured))
    assert any(line.startswith("~") for line in notes(measured))


def test_we_are_the_first_column() -> None:
    table = run(openvino=result(memory=1), inferencex=result(memory=1))
    assert header(table.models["smollm2"])[1].startswith(OURS)

"""What is said of figures that are to be doubted, and what is drawn of few."""

from __future__ import annotations

from array import array
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from inferencex.runtime.load_test.plot import latency_throughput
from inferencex.runtime.load_test.records import RequestRecord
from inferencex.runtime.load_test.report import latency_table, summary_lines, sweep_table
from inferencex.runtime.load_test.run import Measurement
from inferencex.runtime.load_test.statistics import Load, Result, distribution, summarize


def measured(load: Load, *arrivals: float, tokens: int | None = 3) -> Result:
    record = RequestRecord(0, prompt_tokens=5, output_tokens=tokens, ended=10.0, arrivals=array("d", arrivals))
    return summarize(load, Measurement([record], began=0.0, ended=10.0, peak=1, cpu_seconds=0.1), ())


@pytest.fixture
def result() -> Result:
    return measured(Load(4.0, None), 1.0, 2.0, 4.0)


def notes(result: Result) -> list[str]:
    return [line for line in summary_lines(result) if line.startswith("note: ")]


def test_figures_that_are_fine_have_no_notes(result: Result) -> None:
    assert notes(result) == []
    assert summary_lines(result)[:2] == [
        "1 of 1 requests completed in 10.00 s, up to 1 at a time",
        "0.10 requests/s, 0.3 output tokens/s, 0.8 tokens/s with prompts",
    ]


def test_a_busy_load_generator_is_said(result: Result) -> None:
    (note,) = notes(replace(result, client_seconds=8.0))
    assert "busy itself" in note


def test_requests_that_were_sent_late_are_said(result: Result) -> None:
    late = distribution([0.2, 0.2])
    (note,) = notes(replace(result, late=late))
    assert "200 ms or more after they were due" in note
    assert notes(replace(result, late=late, load=Load(4.0, 8))) == [], "a limit makes them wait"


def test_tokens_that_arrive_together_are_said() -> None:
    (note,) = notes(measured(Load(None, 1), 1.0, 1.0, 1.0))
    assert "arrived together" in note


def test_answers_that_nobody_counted_are_said() -> None:
    (note,) = notes(measured(Load(None, 1), tokens=None))
    assert "counted no tokens of 1 answers" in note


def test_what_was_not_measured_is_not_shown(result: Result) -> None:
    whole = measured(Load(None, 1))
    assert latency_table(whole).row_count == 1 and latency_table(result).row_count == 4
    assert sweep_table([result, whole]).row_count == 2


def test_a_plot_of_nothing_and_of_one() -> None:
    nothing = summarize(Load(None, 1), Measurement(), ())
    for results, circles in (([], 0), ([nothing], 0), ([nothing, measured(Load(None, 1), 1.0, 2.0)], 6)):
        drawn = ElementTree.fromstring(latency_throughput('a "model" & <its> name', results))
        assert sum(element.tag.endswith("circle") for element in drawn.iter()) == circles
        assert drawn.get("aria-label") == 'a "model" & <its> name'

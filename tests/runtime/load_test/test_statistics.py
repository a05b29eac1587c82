"""Figures of records whose times are known."""

from __future__ import annotations

from array import array

import pytest

from inferencex.formats.errors import OptionError
from inferencex.runtime.load_test.objectives import Objective, parse_objectives
from inferencex.runtime.load_test.records import RequestRecord
from inferencex.runtime.load_test.run import Measurement
from inferencex.runtime.load_test.statistics import Load, distribution, summarize


def record(sent: float, *arrivals: float, tokens: int | None = None, prompt: int = 10) -> RequestRecord:
    return RequestRecord(
        0,
        prompt_tokens=prompt,
        output_tokens=len(arrivals) if tokens is None else tokens,
        due=sent,
        sent=sent,
        ended=arrivals[-1],
        arrivals=array("d", arrivals),
    )


def test_percentiles_are_exact() -> None:
    found = distribution(float(value) for value in range(1, 102))  # 1 to 101: the p-th percentile is p + 1
    assert found is not None
    assert (found.count, found.mean, found.minimum, found.maximum) == (101, 51, 1, 101)
    assert (found.p50, found.p90, found.p95, found.p99) == (51, 91, 96, 100)
    between = distribution([1.0, 2.0])
    assert between is not None and between.p50 == 1.5 and between.p90 == pytest.approx(1.9)
    alone = distribution([3.0, None])
    assert alone is not None and alone.p50 == alone.p99 == 3.0
    assert distribution([]) is None and distribution([None]) is None


def test_times_of_a_request() -> None:
    one = record(1.0, 1.5, 1.75, 2.25)
    assert one.time_to_first_token == 0.5
    assert one.inter_token_latencies == [0.25, 0.5]
    assert one.time_per_output_token == 0.375
    assert one.latency == 1.25
    assert record(0.0, 1.0).time_per_output_token is None, "one token has no time after it"
    assert record(0.0, 1.0, 2.0, tokens=5).time_per_output_token == 0.25, "an event may bring several tokens"


def test_a_measurement_is_summed_up() -> None:
    failures = [RequestRecord(index, sent=0.0, ended=0.1) for index in range(3)]
    for failure, kind in zip(failures, ("http 429", "http 429", "timeout"), strict=True):
        failure.fail(kind, f"{kind} was said")
    records = [record(0.0, 1.0, 2.0), record(1.0, 1.5, 3.0, 4.0), *failures]
    result = summarize(Load(None, 2), Measurement(records, began=0.0, ended=4.0, peak=2, cpu_seconds=0.5), ())
    assert (result.requests, result.completed, result.errors) == (5, 2, {"http 429": 2, "timeout": 1})
    assert result.examples == {"http 429": "http 429 was said", "timeout": "timeout was said"}
    assert (result.prompt_tokens, result.output_tokens, result.uncounted) == (20, 5, 0)
    assert result.requests_per_second == 0.5
    assert result.output_tokens_per_second == 1.25
    assert result.total_tokens_per_second == 6.25
    assert result.goodput is None
    assert result.time_to_first_token is not None and result.time_to_first_token.mean == 0.75
    assert result.inter_token_latency is not None and result.inter_token_latency.count == 3
    assert result.latency is not None and result.latency.maximum == 3.0


def test_nothing_completed() -> None:
    lost = RequestRecord(0, sent=1.0, ended=1.0)
    lost.fail("connect", "refused")
    result = summarize(Load(None, 1), Measurement([lost], began=1.0, ended=1.0), (Objective("e2e", 1.0),))
    assert result.latency is None and result.output_tokens_per_second == 0 and result.goodput == 0


def test_goodput_counts_what_keeps_to_every_objective() -> None:
    quick, slow_start, slow_token = record(0, 0.1, 0.2, 0.3), record(0, 0.9, 1.0), record(0, 0.1, 0.2, 0.9)
    records = [quick, slow_start, slow_token]
    measurement = Measurement(records, began=0.0, ended=2.0)

    def good(text: str) -> int | None:
        return summarize(Load(None, 1), measurement, parse_objectives(text, stream=True)).good

    assert good("ttft:500ms") == 2
    assert good("itl:150") == 2
    assert good("ttft:500ms,itl:150ms") == 1
    assert good("tpot:0.4s") == 3
    assert good("e2e:500ms") == 1


def test_an_objective_of_every_gap_but_the_worst_twentieth() -> None:
    arrivals = [0.1 * place for place in range(101)]
    hiccup = record(0, *arrivals, arrivals[-1] + 5)
    assert Objective("itl", 0.11).holds(hiccup)
    assert not Objective("itl", 0.09).holds(hiccup)


def test_an_answer_of_one_token_keeps_to_what_is_said_of_the_others() -> None:
    assert Objective("itl", 0.001).holds(record(0, 1.0)) and Objective("tpot", 0.001).holds(record(0, 1.0))


def test_an_answer_that_was_not_streamed_has_but_one_time() -> None:
    whole = RequestRecord(0, output_tokens=3, sent=0.0, ended=1.0)
    assert Objective("e2e", 1.0).holds(whole)
    assert not any(Objective(name, 9.0).holds(whole) for name in ("ttft", "itl", "tpot"))


@pytest.mark.parametrize("text", ["", "ttft", "ttft:", "ttft:fast", "speed:5ms", "ttft:-1ms", "ttft:0", "ttft:5m"])
def test_what_is_no_objective_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"^--slo .*ttft:500ms,itl:50ms"):
        parse_objectives(text, stream=True)


def test_objectives_of_tokens_need_a_stream() -> None:
    assert parse_objectives("e2e:2s", stream=False) == (Objective("e2e", 2.0),)
    with pytest.raises(OptionError, match="--no-stream"):
        parse_objectives("ttft:500ms", stream=False)


@pytest.mark.parametrize(
    ("load", "label"),
    [
        (Load(None, 8), "8 at a time"),
        (Load(4.0, None), "4 requests/s"),
        (Load(0.5, 16), "0.5 requests/s, 16 at a time"),
    ],
)
def test_a_load_is_called(load: Load, label: str) -> None:
    assert load.label == label

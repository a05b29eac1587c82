"""Counting requests: each once, under labels that clients cannot make up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from inferencex.runtime.outputs import CompletionOutput, RequestMetrics, RequestOutput
from inferencex.runtime.server.calls import RequestRecord
from inferencex.runtime.server.errors import ModelNotFound, TimedOut, TooManyRequests
from inferencex.runtime.server.telemetry.gpu import NoGpus
from inferencex.runtime.server.telemetry.metrics import Metrics, inter_token_latency


def output(*lengths: int, first: float = 2.0, finished: float = 5.0) -> RequestOutput:
    times = RequestMetrics(1.0, 1.5, first, finished, sum(lengths))
    outputs = tuple(
        CompletionOutput(index, "", tuple(range(length)), (), None, None, "length", None)
        for index, length in enumerate(lengths)
    )
    return RequestOutput("r", None, (1, 2), outputs, None, 0, times)


def record(**fields: object) -> RequestRecord:
    return RequestRecord("r", "m", "1", "chat", "me", **fields)  # type: ignore[arg-type]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(NoGpus())


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"inferencex_{name}", labels)


def test_a_request_is_accounted_for_once(metrics: Metrics) -> None:
    done = record(prompt_tokens=7, seconds=4.0, output=output(4))
    metrics.accepted(done)
    assert value(metrics, "requests_in_flight", model="m") == 1
    metrics.finished(done)
    assert value(metrics, "requests_in_flight", model="m") == 0
    assert value(metrics, "requests_processed_total", model="m", kind="chat", status="ok") == 1
    assert value(metrics, "version_requests_total", model="m", version="1", status="ok") == 1
    assert value(metrics, "prompt_tokens_total", model="m") == 7
    assert value(metrics, "request_duration_seconds_sum", model="m", kind="chat") == 4.0
    assert value(metrics, "queue_time_seconds_sum", model="m") == 0.5
    assert value(metrics, "time_to_first_token_seconds_sum", model="m") == 1.0
    assert value(metrics, "inter_token_latency_seconds_sum", model="m") == 1.0
    assert value(metrics, "request_output_tokens_bucket", model="m", le="4.0") == 1
    assert value(metrics, "errors_total", model="m", reason="timeout") is None


def test_an_embedding_has_no_output_length(metrics: Metrics) -> None:
    done = record(prompt_tokens=7, seconds=4.0, output=output())
    metrics.accepted(done)
    metrics.finished(done)
    assert value(metrics, "request_prompt_tokens_sum", model="m") == 7
    assert value(metrics, "request_output_tokens_count", model="m") is None


def test_errors_are_counted_by_reason(metrics: Metrics) -> None:
    for status, error in (("timeout", TimedOut("slow")), ("aborted", None)):
        ended = record(status=status, error=error, seconds=9.0)
        metrics.accepted(ended)
        metrics.finished(ended)
    metrics.rejected(record(error=TooManyRequests("full", code="queue_full")))
    assert value(metrics, "errors_total", model="m", reason="timeout") == 1
    assert value(metrics, "errors_total", model="m", reason="queue_full") == 1
    assert value(metrics, "requests_processed_total", model="m", kind="chat", status="aborted") == 1
    assert value(metrics, "requests_processed_total", model="m", kind="chat", status="rejected") == 1
    # A request that its client ended says nothing of how long requests take.
    assert value(metrics, "request_duration_seconds_count", model="m", kind="chat") == 1


def test_a_name_that_a_client_made_up_is_no_label(metrics: Metrics) -> None:
    for number in range(100):
        unknown = RequestRecord("r", f"made-up-{number}", "", "chat", "me", error=ModelNotFound("no"))
        metrics.rejected(unknown)
    assert value(metrics, "errors_total", model="unknown", reason="model_not_found") == 100
    assert b"made-up" not in metrics.render()


def test_http_responses_are_counted_by_route_and_known_methods(metrics: Metrics) -> None:
    for method in ("GET", "BREW", "X" * 100):
        metrics.http_request(method, "/v1/models/{uid}", 200, 0.5)
    path = "/v1/models/{uid}"
    assert value(metrics, "http_requests_total", method="GET", path=path, status="200") == 1
    assert value(metrics, "http_requests_total", method="other", path=path, status="200") == 2
    assert value(metrics, "http_request_duration_seconds_sum", method="GET", path=path) == 0.5


def test_the_latency_of_several_continuations_is_that_of_the_longest() -> None:
    assert inter_token_latency(output(4, 2, 1)) == 1.0
    assert inter_token_latency(output(1)) is None
    assert inter_token_latency(output()) is None


def test_two_servers_in_one_process_count_apart() -> None:
    one, other = Metrics(NoGpus()), Metrics(NoGpus())
    one.accepted(record())
    assert value(one, "requests_in_flight", model="m") == 1
    assert value(other, "requests_in_flight", model="m") is None


def test_a_machine_without_gpus_reports_none_rather_than_zero(metrics: Metrics) -> None:
    text = metrics.render().decode()
    assert "# TYPE inferencex_gpu_utilization gauge" in text
    assert not re.search(r"^inferencex_gpu", text, re.MULTILINE)


def test_the_documentation_lists_every_metric(metrics: Metrics) -> None:
    page = (Path(__file__).parents[4] / "docs" / "serving.md").read_text()
    documented = set(re.findall(r"^\| `(inferencex_\w+)`", page, re.MULTILINE))
    exposed = set()
    for family in metrics.registry.collect():
        if family.name.startswith("inferencex_"):
            exposed.add(f"{family.name}_total" if family.type == "counter" else family.name)
    assert documented == exposed

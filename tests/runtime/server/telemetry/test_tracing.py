"""Spans of a request, with the attributes of the conventions for generative AI."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest

from inferencex.formats.errors import OptionError
from inferencex.runtime.outputs import CompletionOutput, RequestMetrics, RequestOutput
from inferencex.runtime.server.calls import RequestRecord
from inferencex.runtime.server.errors import TimedOut
from inferencex.runtime.server.telemetry.tracing import RequestTraces, open_traces

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="needs inferencex[tracing]")

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Recorded:
    """A provider whose spans stay here."""

    def __init__(self) -> None:
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self.exporter = InMemorySpanExporter()
        self.provider = sdk.TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.traces = RequestTraces(self.provider)

    def spans(self) -> dict[str, Any]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


def record(kind: str = "chat", **fields: object) -> RequestRecord:
    now = time.perf_counter()
    outputs = (CompletionOutput(0, "text", (1, 2, 3), (), None, None, "stop", None),)
    times = RequestMetrics(now - 4.0, now - 3.0, now - 2.0, now, 3)
    given = {
        "prompt_tokens": 2,
        "seconds": 4.5,
        "output": RequestOutput("r", "secret", (1, 2), outputs, None, 1, times),
        "trace_headers": {"traceparent": PARENT},
        **fields,
    }
    return RequestRecord("req-1", "m", "2", kind, "key-1", **given)  # type: ignore[arg-type]


def test_a_request_continues_the_callers_trace_and_shows_its_phases() -> None:
    recorded = Recorded()
    recorded.traces.accepted(record())
    recorded.traces.finished(record())
    spans = recorded.spans()
    assert list(spans) == ["queue", "prefill", "decode", "chat m"]
    request = spans["chat m"]
    assert f"{request.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{request.parent.span_id:016x}" == PARENT.split("-")[2]
    assert (request.end_time - request.start_time) / 1e9 == pytest.approx(4.5)
    for name, seconds in (("queue", 1.0), ("prefill", 1.0), ("decode", 2.0)):
        phase = spans[name]
        assert phase.parent.span_id == request.context.span_id
        assert (phase.end_time - phase.start_time) / 1e9 == pytest.approx(seconds, abs=0.01)
        assert request.start_time <= phase.start_time <= phase.end_time <= request.end_time
    attributes = dict(request.attributes)
    assert attributes["gen_ai.operation.name"] == "chat" and attributes["gen_ai.request.model"] == "m"
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (2, 3)
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert "secret" not in str(attributes)


def test_a_request_that_failed_says_so() -> None:
    recorded = Recorded()
    recorded.traces.finished(record("grpc.generate", output=None, status="timeout", error=TimedOut("slow")))
    recorded.traces.rejected(record("embeddings", output=None, trace_headers={"traceparent": "nonsense"}))
    failed, refused = recorded.spans().values()
    assert failed.name == "text_completion m" and refused.name == "embeddings m"
    assert failed.status.status_code.name == "ERROR" and failed.attributes["error.type"] == "timeout"
    assert refused.parent is None and refused.attributes["inferencex.status"] == "rejected"


def test_what_never_began_has_no_phases_that_it_did_not_reach() -> None:
    recorded = Recorded()
    waiting = record(status="aborted")
    assert waiting.output is not None
    waiting.output.metrics.first_scheduled_time = waiting.output.metrics.first_token_time = None
    recorded.traces.finished(waiting)
    assert list(recorded.spans()) == ["queue", "chat m"]


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://x", "http://", ""])
def test_an_address_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(OptionError, match="otlp_endpoint"):
        open_traces(endpoint)


def test_without_the_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(OptionError, match=r"inferencex\[tracing\]"):
        open_traces("http://localhost:4318")


def test_traces_are_sent_where_they_should_be() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs inferencex[tracing]")
    for endpoint, url in (("http://c:4318", "http://c:4318/v1/traces"), ("https://c/own/path", "https://c/own/path")):
        traces = open_traces(endpoint)
        processors = traces._provider._active_span_processor._span_processors
        assert processors[0].span_exporter._endpoint == url
        traces.shutdown()

"""OpenTelemetry traces: a span for each request, and below it its time in the queue, prompt and answer."""

from __future__ import annotations

import os
import time
from importlib import import_module
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from inferencex.formats.errors import OptionError
from inferencex.runtime.outputs import RequestOutput
from inferencex.runtime.server.calls import RequestRecord

SERVICE_NAME = "inferencex"

_EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"

# `gen_ai.operation.name` of OpenTelemetry's conventions for generative AI, by the part of the kind that tells.
_OPERATIONS = {"chat": "chat", "responses": "chat", "embed": "embeddings"}


class RequestTraces:
    """Makes the spans of a request once it has ended or was refused; an `Observer`.

    Attributes follow OpenTelemetry's semantic conventions for generative AI. A request that came with a `traceparent`
    header becomes part of that trace. Spans are sent in batches by a thread of the SDK.
    """

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("inferencex.runtime.server")
        self._trace = import_module("opentelemetry.trace")
        propagation = import_module("opentelemetry.trace.propagation.tracecontext")
        self._propagator = propagation.TraceContextTextMapPropagator()

    def accepted(self, record: RequestRecord) -> None:
        """Do nothing: what is worth telling is known at the end."""

    def rejected(self, record: RequestRecord) -> None:
        """Make the span of a request that was refused."""
        self.finished(record)

    def finished(self, record: RequestRecord) -> None:
        """Make the spans of a request."""
        end = time.time_ns()
        start = end - int(record.seconds * 1e9)
        operation = _operation(record.kind)
        span = self._tracer.start_span(
            f"{operation} {record.model}".rstrip(),
            context=self._propagator.extract(dict(record.trace_headers)),
            kind=self._trace.SpanKind.SERVER,
            start_time=start,
            attributes=_attributes(record, operation),
        )
        if record.error is not None:
            span.set_attribute("error.type", record.error.reason)
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, str(record.error)))
        if record.output is not None:
            self._make_phases(span, record.output, start, end)
        span.end(end_time=end)

    def shutdown(self) -> None:
        """Send what has not been sent, and end the SDK's thread. Waits for the network: not for the event loop."""
        self._provider.shutdown()

    def _make_phases(self, span: Any, output: RequestOutput, start: int, end: int) -> None:
        times = output.metrics
        now = time.perf_counter()  # the clock that an engine reads

        def at(seconds: float) -> int:
            return min(max(end - int((now - seconds) * 1e9), start), end)

        marks = [times.arrival_time, times.first_scheduled_time, times.first_token_time, times.finished_time]
        context = self._trace.set_span_in_context(span)
        for name, (since, until) in zip(("queue", "prefill", "decode"), pairwise(marks), strict=True):
            if since is None:
                return
            phase = self._tracer.start_span(name, context=context, start_time=at(since))
            last = times.finished_time if until is None else until
            phase.end(end_time=end if last is None else at(last))
            if until is None:
                return


def open_traces(endpoint: str | None = None) -> RequestTraces:
    """Return traces that go to an OTLP collector over HTTP, such as `http://localhost:4318`.

    What is not said here comes from the SDK's own variables (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_TRACES_SAMPLER`,
    `OTEL_SERVICE_NAME`, ...). Raises OptionError for what is no address of a collector, and where the packages of the
    extra `tracing` are missing.
    """
    url = None if endpoint is None else _traces_url(endpoint)
    try:
        sdk, export = import_module("opentelemetry.sdk.trace"), import_module("opentelemetry.sdk.trace.export")
        resources, exporter = import_module("opentelemetry.sdk.resources"), import_module(_EXPORTER)
    except ModuleNotFoundError as error:
        raise OptionError(
            f"tracing needs the package {error.name!r}, which is not installed; install inferencex[tracing]"
        ) from error
    name = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": SERVICE_NAME}
    provider = sdk.TracerProvider(resource=resources.Resource.create(name), shutdown_on_exit=False)
    provider.add_span_processor(export.BatchSpanProcessor(exporter.OTLPSpanExporter(endpoint=url)))
    return RequestTraces(provider)


def _traces_url(endpoint: str) -> str:
    address = urlsplit(endpoint)
    if address.scheme not in ("http", "https") or not address.netloc:
        raise OptionError(f"otlp_endpoint={endpoint!r}; expected the address of a collector, like http://host:4318")
    return endpoint if address.path.strip("/") else f"{address.scheme}://{address.netloc}/v1/traces"


def _operation(kind: str) -> str:
    return next((operation for part, operation in _OPERATIONS.items() if part in kind), "text_completion")


def _attributes(record: RequestRecord, operation: str) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": SERVICE_NAME,
        "gen_ai.request.model": record.model,
        "gen_ai.response.id": record.request_id,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "inferencex.model.version": record.version,
        "inferencex.kind": record.kind,
        "inferencex.caller": record.caller,
        "inferencex.status": "rejected" if record.output is None and record.status == "ok" else record.status,
    }
    output = record.output
    if output is not None:
        attributes["gen_ai.usage.output_tokens"] = output.metrics.num_generated_tokens
        attributes["gen_ai.response.finish_reasons"] = [each.finish_reason for each in output.outputs]
        attributes["inferencex.cached_tokens"] = output.num_cached_tokens
    return attributes

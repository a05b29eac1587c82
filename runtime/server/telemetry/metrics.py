"""Prometheus metrics of one server, accounted for when requests end and read off the engines when asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from inferencex.formats.errors import InferenceXError
from inferencex.runtime.outputs import RequestOutput
from inferencex.runtime.server.calls import RequestRecord
from inferencex.runtime.server.telemetry.engine_collector import EngineCollector
from inferencex.runtime.server.telemetry.gpu import GpuCollector, GpuReader, find_gpus

if TYPE_CHECKING:
    from inferencex.runtime.server.models.registry import ModelRegistry
    from inferencex.runtime.server.models.served import ServedModel

CONTENT_TYPE = CONTENT_TYPE_LATEST
UNKNOWN_MODEL = "unknown"

_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})

# In seconds, for small models on GPUs at the lower end and long answers from CPUs at the upper one.
_DURATIONS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_WAITS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_TOKEN_TIMES = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 0.8, 2.0, 5.0)
_LENGTHS = tuple(float(1 << power) for power in range(18))
_HTTP_DURATIONS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """The metrics of one server, in a registry of their own; an `Observer` of requests and of models.

    Nothing is done per token: a request's own clock says, once it has ended, how long it waited and wrote. The text
    of docs/serving.md lists every metric.
    """

    def __init__(self, gpus: GpuReader | None = None) -> None:
        self.registry = CollectorRegistry()
        self._models: set[str] = set()
        self._requests = self._counter(
            "requests_processed",
            "Requests that have ended, and those refused before they were queued (status rejected)",
            "model",
            "kind",
            "status",
        )
        self._version_requests = self._counter(
            "version_requests",
            "Requests that have ended, by the version that served them",
            "model",
            "version",
            "status",
        )
        self._errors = self._counter("errors", "Requests refused or ended by an error", "model", "reason")
        self._in_flight = Gauge(
            "inferencex_requests_in_flight",
            "Requests accepted and not ended",
            ("model",),
            registry=self.registry,
        )
        self._durations = self._histogram(
            "request_duration_seconds",
            "From acceptance to the end of a request; requests that clients aborted are left out",
            _DURATIONS,
            "model",
            "kind",
        )
        self._first_tokens = self._histogram(
            "time_to_first_token_seconds", "From acceptance to the first output token", _WAITS, "model"
        )
        self._token_times = self._histogram(
            "inter_token_latency_seconds",
            "Mean time from one output token of a request to the next",
            _TOKEN_TIMES,
            "model",
        )
        self._queue_times = self._histogram(
            "queue_time_seconds", "From acceptance to the first step that computed the request", _WAITS, "model"
        )
        self._prompt_lengths = self._histogram("request_prompt_tokens", "Tokens of prompts", _LENGTHS, "model")
        self._output_lengths = self._histogram(
            "request_output_tokens", "Output tokens of requests, all continuations together", _LENGTHS, "model"
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that have ended", "model")
        self._http_requests = self._counter(
            "http_requests", "HTTP responses, by the route's pattern", "method", "path", "status"
        )
        self._http_durations = self._histogram(
            "http_request_duration_seconds",
            "From an HTTP request's headers to the end of its response",
            _HTTP_DURATIONS,
            "method",
            "path",
        )
        self._load_seconds = Gauge(
            "inferencex_model_load_seconds",
            "How long the latest load of a model took, warm-up included",
            ("model",),
            registry=self.registry,
        )
        self._loads = self._counter("model_loads", "Loads of models, by how they ended", "model", "status")
        self._engines = EngineCollector()
        self.registry.register(self._engines)
        self.registry.register(GpuCollector(find_gpus() if gpus is None else gpus))
        ProcessCollector(registry=self.registry)

    def watch(self, models: ModelRegistry) -> None:
        """Read the engines of these models whenever metrics are asked for."""
        self._engines.watch(models)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format (`CONTENT_TYPE`)."""
        return generate_latest(self.registry)

    def accepted(self, record: RequestRecord) -> None:
        """Count a request that was queued."""
        self._models.add(record.model)
        self._in_flight.labels(record.model).inc()

    def rejected(self, record: RequestRecord) -> None:
        """Count a request that was refused."""
        # What a client calls a model does not become a label unless there is such a model.
        model = record.model if record.model in self._models else UNKNOWN_MODEL
        self._requests.labels(model, record.kind, "rejected").inc()
        if record.error is not None:
            self._errors.labels(model, record.error.reason).inc()

    def finished(self, record: RequestRecord) -> None:
        """Account for a request that has ended."""
        model = record.model
        self._in_flight.labels(model).dec()
        self._requests.labels(model, record.kind, record.status).inc()
        self._version_requests.labels(model, record.version, record.status).inc()
        self._prompt_tokens.labels(model).inc(record.prompt_tokens)
        self._prompt_lengths.labels(model).observe(record.prompt_tokens)
        if record.error is not None:
            self._errors.labels(model, record.error.reason).inc()
        if record.status != "aborted":
            self._durations.labels(model, record.kind).observe(record.seconds)
        if record.output is not None:
            self._observe_output(model, record.output)

    def model_loaded(self, model: ServedModel, seconds: float) -> None:
        """Count a load that has succeeded."""
        self._models.add(model.name)
        self._loads.labels(model.name, "ok").inc()
        self._load_seconds.labels(model.name).set(seconds)

    def model_failed(self, uid: str, error: InferenceXError) -> None:
        """Count a load that has failed."""
        self._loads.labels(uid, "failed").inc()

    def model_unloaded(self, model: ServedModel) -> None:
        """Keep the counts of a version that is gone, so that the model's counters never fall."""
        self._engines.retire(model)
        self._version_requests.remove_by_labels({"model": model.name, "version": model.version})

    def http_request(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count an HTTP response. `path` is the pattern of its route, so that there are only so many."""
        method = method if method in _METHODS else "other"  # a client may send any word
        self._http_requests.labels(method, path, str(status)).inc()
        self._http_durations.labels(method, path).observe(seconds)

    def _observe_output(self, model: str, output: RequestOutput) -> None:
        times = output.metrics
        if output.outputs:  # an embedding has none
            self._output_lengths.labels(model).observe(times.num_generated_tokens)
        if times.queue_seconds is not None:
            self._queue_times.labels(model).observe(times.queue_seconds)
        if times.time_to_first_token is not None:
            self._first_tokens.labels(model).observe(times.time_to_first_token)
        latency = inter_token_latency(output)
        if latency is not None:
            self._token_times.labels(model).observe(latency)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"inferencex_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"inferencex_{name}", text, labels, buckets=buckets, registry=self.registry)


def inter_token_latency(output: RequestOutput) -> float | None:
    """Return the mean seconds between the output tokens of one continuation; None where there are fewer than two.

    Continuations of one prompt are written side by side, so the longest of them is what took the time.
    """
    times = output.metrics
    longest = max((len(each.token_ids) for each in output.outputs), default=0)
    if times.first_token_time is None or times.finished_time is None or longest < 2:
        return None
    return (times.finished_time - times.first_token_time) / (longest - 1)

"""Metrics that engines keep anyway, read off them when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inferencex.runtime.server.models.totals import EngineTotals

if TYPE_CHECKING:
    from inferencex.runtime.server.models.registry import ModelRegistry
    from inferencex.runtime.server.models.served import ServedModel

_COUNTERS = {
    "generation_tokens": ("generated_tokens", "Output tokens, counted as they are generated"),
    "prefix_cache_queries": ("prompt_tokens", "Prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("cached_tokens", "Prompt tokens found in the prefix cache"),
    "preemptions": ("preemptions", "Times that a sequence gave its KV blocks to another one"),
    "engine_steps": ("steps", "Steps that engines ran"),
}
_GAUGES = {
    "requests_running": ("running", "Sequences that the next step computes"),
    "requests_waiting": ("waiting", "Sequences in the engines' queues, preempted ones included"),
    "kv_cache_blocks": ("kv_blocks", "Blocks of the KV cache"),
    "kv_cache_blocks_used": ("kv_blocks_used", "Blocks of the KV cache that sequences hold"),
}


class EngineCollector(Collector):
    """Sums the engines of each model, replicas and versions together.

    Counts of engines that are gone (`retire`) stay in the sums: a counter never falls while the server lives.
    """

    def __init__(self) -> None:
        self._models: ModelRegistry | None = None
        self._retired: dict[str, EngineTotals] = {}

    def watch(self, models: ModelRegistry) -> None:
        """Read these models from now on."""
        self._models = models

    def retire(self, model: ServedModel) -> None:
        """Keep the counts of a model whose engines go away now."""
        counts = model.totals.counts()
        self._retired[model.name] = EngineTotals.sum([counts, self._retired.get(model.name, EngineTotals())])

    def describe(self) -> Iterator[Metric]:
        """Yield the metrics without values, which is enough to register them."""
        return self._collect([])

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as the engines stand now."""
        return self._collect([] if self._models is None else list(self._models.loaded()))

    def _collect(self, models: list[ServedModel]) -> Iterator[Metric]:
        by_name: dict[str, list[ServedModel]] = {}
        for model in models:
            by_name.setdefault(model.name, []).append(model)
        now = {name: EngineTotals.sum(model.totals for model in same) for name, same in by_name.items()}
        ever = {
            name: EngineTotals.sum([now.get(name, EngineTotals()), self._retired.get(name, EngineTotals())])
            for name in {**now, **self._retired}
        }
        for metric, (field, text) in _COUNTERS.items():
            counter = CounterMetricFamily(f"inferencex_{metric}", text, labels=["model"])
            for name, totals in ever.items():
                counter.add_metric([name], getattr(totals, field))
            yield counter
        for metric, (field, text) in _GAUGES.items():
            yield _gauge(metric, text, {name: getattr(totals, field) for name, totals in now.items()})
        yield _gauge(
            "kv_cache_usage_ratio",
            "Part of the KV cache that sequences hold, 0 to 1",
            {name: totals.kv_blocks_used / max(totals.kv_blocks, 1) for name, totals in now.items()},
        )
        yield _gauge(
            "pending_requests",
            "Requests accepted that no engine computes at the moment",
            {name: sum(model.num_pending for model in same) for name, same in by_name.items()},
        )
        yield _gauge(
            "model_replicas",
            "Engines that serve the model",
            {n: sum(len(m.loops) for m in s) for n, s in by_name.items()},
        )
        weights = GaugeMetricFamily(
            "inferencex_model_weight", "Share of the model's traffic that a version gets", labels=["model", "version"]
        )
        for model in models:
            weights.add_metric([model.name, model.version], self._share(model))
        yield weights

    def _share(self, model: ServedModel) -> float:
        if self._models is None:
            return 0.0
        return self._models.get(model.name).share(model.version)


def _gauge(name: str, text: str, values: dict[str, float]) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(f"inferencex_{name}", text, labels=["model"])
    for model, value in values.items():
        gauge.add_metric([model], value)
    return gauge

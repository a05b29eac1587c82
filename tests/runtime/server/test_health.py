"""What load balancers, Prometheus and the web page ask."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from inferencex.formats.errors import BundleError
from inferencex.runtime import SamplingParams
from inferencex.runtime.server.calls import ANONYMOUS, Call
from inferencex.runtime.server.models.version import LoadRequest
from inferencex.runtime.server.service import InferenceService
from tests.runtime.server.models.hash_loader import HashLoader
from tests.runtime.server.operated import operate


@pytest.fixture
def loader(hash_backend_class: Callable[[], Any]) -> HashLoader:
    return HashLoader(hash_backend_class)


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the samples of Prometheus' text format by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_server_is_alive_at_once_and_ready_when_its_models_are(loader: HashLoader, text_bundle: Path) -> None:
    async def scenario(client: httpx.AsyncClient, service: InferenceService) -> None:
        response = await client.get("/ready")
        assert response.status_code == 503
        assert response.json() == {"ready": False, "reasons": ["no model is loaded"]}
        loader.held = threading.Event()
        version = service.registry.load(LoadRequest("m", text_bundle, required=True))
        await asyncio.to_thread(loader.begun.wait, 30)
        assert (await client.get("/health")).json() == {"status": "ok"}
        response = await client.get("/ready")
        assert response.status_code == 503 and response.json()["reasons"][0].startswith("m: version 1 is")
        loader.held.set()
        await version.loaded()
        assert (await client.get("/ready")).json() == {"ready": True, "reasons": []}
        service.begin_drain()
        assert (await client.get("/ready")).json()["reasons"] == ["the server is shutting down"]
        assert (await client.get("/health")).status_code == 200
        status = (await client.get("/v1/status")).json()
        assert status["draining"] and not status["ready"]

    operate(scenario, loader)


def test_a_model_that_fails_is_said_to_be_missing(loader: HashLoader, text_bundle: Path) -> None:
    async def scenario(client: httpx.AsyncClient, service: InferenceService) -> None:
        loader.failure = BundleError("damaged")
        with pytest.raises(BundleError):
            await service.registry.load(LoadRequest("m", text_bundle, required=True)).loaded()
        assert (await client.get("/ready")).json()["reasons"] == ["m: version 1 is failed: damaged"]

    operate(scenario, loader)


def test_a_model_that_has_lost_what_it_runs_on_is_not_ready(loader: HashLoader, text_bundle: Path) -> None:
    """Such as a process of several: requests belong elsewhere, and whoever watches restarts or replaces it."""

    async def scenario(client: httpx.AsyncClient, service: InferenceService) -> None:
        model = await service.registry.load(LoadRequest("m", text_bundle)).loaded()
        executable: Any = model.llm.engine.executable
        executable.failure, executable.abandon = None, lambda reason: None
        assert (await client.get("/ready")).status_code == 200
        executable.failure = "rank 1 has failed"
        response = await client.get("/ready")
        assert (response.status_code, response.json()["reasons"]) == (503, ["m@1: rank 1 has failed"])
        await service.registry.load(LoadRequest("m", text_bundle, replace=True)).loaded()
        assert (await client.get("/ready")).status_code == 200

    operate(scenario, loader)


def test_status_and_metrics_tell_what_was_done(loader: HashLoader, text_bundle: Path) -> None:
    async def scenario(client: httpx.AsyncClient, service: InferenceService) -> None:
        await service.registry.load(LoadRequest("m", text_bundle)).loaded()
        before = (await client.get("/v1/status")).json()["models"][0]
        assert before["generated_tokens"] == 0 and before["kv_blocks"] > 0
        for number in range(3):
            params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
            call = Call("m", list(range(40)), params, f"r{number}", "completions")
            await (await service.start(call, ANONYMOUS)).result()
        (model,) = (await client.get("/v1/status")).json()["models"]
        assert (model["name"], model["versions"], model["replicas"]) == ("m", ["1"], 1)
        assert (model["prompt_tokens"], model["generated_tokens"]) == (120, 24)
        assert model["prefix_hit_rate"] == model["cached_tokens"] / 120 > 0.5
        assert model["running"] == model["waiting"] == model["pending"] == model["kv_blocks_used"] == 0
        response = await client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=")
        found = samples(response.text)
        m = (("model", "m"),)
        assert found["inferencex_prompt_tokens_total", m] == 120
        assert found["inferencex_generation_tokens_total", m] == 24
        assert found["inferencex_prefix_cache_queries_total", m] == 120
        assert found["inferencex_prefix_cache_hits_total", m] == model["cached_tokens"]
        assert found["inferencex_pending_requests", m] == found["inferencex_requests_in_flight", m] == 0
        done = (("kind", "completions"), ("model", "m"), ("status", "ok"))
        assert found["inferencex_requests_processed_total", done] == 3
        assert found["inferencex_time_to_first_token_seconds_count", m] == 3
        assert found["inferencex_inter_token_latency_seconds_count", m] == 3
        assert found["inferencex_request_output_tokens_sum", m] == 24

    operate(scenario, loader)


def test_what_waits_is_counted_while_it_waits(loader: HashLoader, text_bundle: Path) -> None:
    async def scenario(client: httpx.AsyncClient, service: InferenceService) -> None:
        model = await service.registry.load(LoadRequest("m", text_bundle)).loaded()
        gate, entered = threading.Event(), threading.Event()

        def hold(batch: Any) -> None:
            entered.set()
            assert gate.wait(30)

        model.llm.engine.executable.before_step = hold  # type: ignore[attr-defined]
        calls = [Call("m", [5, 6], SamplingParams(max_tokens=2), f"r{number}", "chat") for number in range(20)]
        generations = [await service.start(call, ANONYMOUS) for call in calls]
        await asyncio.to_thread(entered.wait, 30)
        assert (await client.get("/health")).status_code == 200
        status = (await client.get("/v1/status")).json()
        assert status["requests_in_flight"] == 20
        found = samples((await client.get("/metrics")).text)
        m = (("model", "m"),)
        running = found["inferencex_requests_running", m]
        assert 1 <= running <= 8 and found["inferencex_pending_requests", m] == 20 - running
        assert found["inferencex_requests_in_flight", m] == 20
        gate.set()
        for generation in generations:
            await generation.result()
        assert samples((await client.get("/metrics")).text)["inferencex_pending_requests", m] == 0

    operate(scenario, loader)


def test_counts_go_on_when_a_version_is_replaced(loader: HashLoader, text_bundle: Path) -> None:
    async def scenario(client: httpx.AsyncClient, service: InferenceService) -> None:
        m = (("model", "m"),)
        for number in range(1, 4):
            before = [version for each in service.registry.deployments for version in each.versions.values()]
            await service.registry.load(LoadRequest("m", text_bundle, replace=True)).loaded()
            for version in before:
                await version.gone()
            call = Call("m", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=10), f"r{number}", "chat")
            await (await service.start(call, ANONYMOUS)).result()
            found = samples((await client.get("/metrics")).text)
            assert found["inferencex_generation_tokens_total", m] == 10 * number
            assert found["inferencex_prompt_tokens_total", m] == 3 * number
            versions = {
                dict(labels)["version"] for name, labels in found if name == "inferencex_version_requests_total"
            }
            assert versions == {str(number)}
            assert found["inferencex_model_weight", (("model", "m"), ("version", str(number)))] == 1.0

    operate(scenario, loader)

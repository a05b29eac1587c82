"""Models are found, loaded beside what runs, replaced, rolled back and unloaded, and no request notices."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from inferencex.formats.errors import BackendError, BundleError
from inferencex.runtime import SamplingParams
from inferencex.runtime.server.calls import Caller
from inferencex.runtime.server.errors import Conflict, InvalidRequest, ModelNotFound, Unavailable
from inferencex.runtime.server.models import served as served_module
from inferencex.runtime.server.models.options import ModelOptions
from inferencex.runtime.server.models.registry import ModelRegistry
from inferencex.runtime.server.models.served import ServedModel
from inferencex.runtime.server.models.version import LoadRequest
from tests.runtime.server.models.hash_loader import HashLoader, ask


class Events:
    """What a registry's observers were told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def model_loaded(self, model: ServedModel, seconds: float) -> None:
        self.told.append(f"loaded {model.name}@{model.version}")

    def model_failed(self, uid: str, error: Exception) -> None:
        self.told.append(f"failed {uid}")

    def model_unloaded(self, model: ServedModel) -> None:
        self.told.append(f"unloaded {model.name}@{model.version}")


def test_a_model_is_found_by_uid_alias_version_and_as_the_first(loader: HashLoader, text_bundle: Path) -> None:
    async def scenario() -> None:
        registry = ModelRegistry(loader=loader)
        with pytest.raises(ModelNotFound):
            registry.resolve(None)
        first = registry.load(LoadRequest("m", text_bundle, aliases=("other", "latest")))
        assert first.state == "queued"
        with pytest.raises(Unavailable, match="being loaded"):
            registry.resolve("m")
        model = await first.loaded()
        await registry.load(LoadRequest("second", text_bundle)).loaded()
        for name in ("m", "other", "m@1", None, ""):
            with registry.resolve(name) as lease:
                assert lease.model is model and model.num_leases == 1
        assert [served.name for served in registry.list()] == ["m", "second"]
        assert model.aliases == ("other", "latest")
        for name in ("M", "m@2", "@1", "x@1", "m" * 300):
            with pytest.raises(ModelNotFound):
                registry.resolve(name)
        await registry.close()
        with pytest.raises(ModelNotFound):
            registry.resolve("m")

    asyncio.run(scenario())


def test_what_cannot_be_loaded_leaves_everything_as_it_is(loader: HashLoader, text_bundle: Path) -> None:
    async def scenario() -> None:
        events = Events()
        registry = ModelRegistry(loader=loader, observers=[events])
        model = await registry.load(LoadRequest("m", text_bundle)).loaded()
        for failure, kind in ((BundleError("damaged"), BundleError), (ZeroDivisionError("oh"), BackendError)):
            loader.failure = failure
            version = registry.load(LoadRequest("m", text_bundle, replace=True, aliases=("new",)))
            with pytest.raises(kind, match=r"damaged|ZeroDivisionError: oh"):
                await version.loaded()
            assert version.state == "failed"
            with registry.resolve("m") as lease:
                assert lease.model is model
            with pytest.raises(ModelNotFound):
                registry.resolve("new")
        with pytest.raises(BackendError):
            await registry.load(LoadRequest("alone", text_bundle)).loaded()
        with pytest.raises(ModelNotFound, match="could not be loaded"):
            registry.resolve("alone")
        loader.failure = None
        assert (await registry.load(LoadRequest("alone", text_bundle)).loaded()).name == "alone"
        assert [version.state for version in registry.get("alone").versions.values()] == ["ready"]
        assert events.told == ["loaded m@1", "failed m", "failed m", "failed alone", "loaded alone@2"]
        await registry.close()

    asyncio.run(scenario())


def test_a_request_that_cannot_be_is_refused_before_anything_is_loaded(loader: HashLoader, text_bundle: Path) -> None:
    async def scenario() -> None:
        registry = ModelRegistry(loader=loader)
        await registry.load(LoadRequest("m", text_bundle, aliases=("alias",))).loaded()
        await registry.load(LoadRequest("n", text_bundle)).loaded()
        refused = [
            (LoadRequest("m", text_bundle), Conflict, "replace: true"),
            (LoadRequest("alias", text_bundle), Conflict, "belongs to the model 'm'"),
            (LoadRequest("x", text_bundle, aliases=("n",)), Conflict, "belongs to the model 'n'"),
            (LoadRequest("m", text_bundle, version="1", replace=True), Conflict, "there already"),
            (LoadRequest("m", text_bundle, replace=True, weight=0.5), InvalidRequest, "give one of them"),
            (LoadRequest("m", text_bundle, weight=1.5), InvalidRequest, "from 0 to 1"),
            (LoadRequest("m", text_bundle, weight=float("nan")), InvalidRequest, "from 0 to 1"),
            (LoadRequest("a@b", text_bundle), InvalidRequest, "no name"),
            (LoadRequest("a\nb", text_bundle), InvalidRequest, "no name"),
        ]
        for request, error, message in refused:
            with pytest.raises(error, match=message):
                registry.load(request)
        assert len(loader.paths) == 2 and {deployment.uid for deployment in registry.deployments} == {"m", "n"}
        await registry.close()

    asyncio.run(scenario())


def test_replacing_a_version_drops_no_request(loader: HashLoader, text_bundle: Path) -> None:
    async def scenario() -> None:
        events = Events()
        registry = ModelRegistry(loader=loader, observers=[events])
        await registry.load(LoadRequest("m", text_bundle)).loaded()
        answered: Counter[str] = Counter()
        stop = asyncio.Event()

        async def client(number: int) -> None:
            count = 0
            while not stop.is_set():
                with registry.resolve("m") as lease:
                    output = await ask(lease.model, f"{number}-{count}", max_tokens=12)
                assert [len(each.token_ids) for each in output.outputs] == [12]
                answered[lease.model.version] += 1
                count += 1

        clients = [asyncio.create_task(client(number)) for number in range(6)]
        for number in range(2, 5):
            loader.begun.clear()
            loader.held = threading.Event()
            version = registry.load(LoadRequest("m", text_bundle, replace=True))
            await asyncio.to_thread(loader.begun.wait, 30)
            before = answered[str(number - 1)]
            while answered[str(number - 1)] == before:  # the old version serves while the new one loads
                await asyncio.sleep(0)
            old = registry.get("m").versions[str(number - 1)]
            loader.held.set()
            model = await version.loaded()
            with registry.resolve("m") as lease:
                assert lease.model is model
            await old.gone()
            assert list(registry.get("m").versions) == [str(number)]
        stop.set()
        await asyncio.gather(*clients)
        assert set(answered) == {"1", "2", "3", "4"}
        await registry.close()
        assert events.told[-1] == "unloaded m@4" and len(events.told) == 8

    asyncio.run(scenario())


def test_a_share_of_the_traffic_goes_to_a_canary(loader: HashLoader, text_bundle: Path) -> None:
    def shares(registry: ModelRegistry, count: int) -> dict[str, float]:
        chosen: Counter[str] = Counter()
        for _ in range(count):
            with registry.resolve("m") as lease:
                chosen[lease.model.version] += 1
        return {version: number / count for version, number in chosen.items()}

    async def scenario() -> None:
        registry = ModelRegistry(loader=loader)
        await registry.load(LoadRequest("m", text_bundle)).loaded()
        await registry.load(LoadRequest("m", text_bundle, version="canary", weight=0.0)).loaded()
        assert shares(registry, 50) == {"1": 1.0}
        with registry.resolve("m@canary") as lease:
            assert lease.model.version == "canary"
        registry.set_weights("m", {"1": 3, "canary": 1})
        found = shares(registry, 4000)
        assert abs(found["canary"] - 0.25) < 0.05 and registry.get("m").share("canary") == 0.25
        registry.set_weights("m", {"canary": 1})
        assert shares(registry, 50) == {"canary": 1.0}
        registry.rollback("m")
        assert registry.get("m").share("1") == 0.75
        registry.rollback("m")
        assert registry.get("m").share("canary") == 1.0
        await registry.load(LoadRequest("m", text_bundle, weight=0.2)).loaded()
        assert registry.get("m").share("2") == pytest.approx(0.2)
        for weights in ({"1": -1.0}, {"1": 0.0}, {"1": float("inf")}, {"1": 1e308, "2": 1e308}, {}):
            with pytest.raises(InvalidRequest):
                registry.set_weights("m", weights)
        with pytest.raises(ModelNotFound, match="has no version '9'"):
            registry.set_weights("m", {"9": 1.0})
        await registry.close()

    asyncio.run(scenario())


def test_a_caller_stays_with_a_version_where_that_is_wanted(loader: HashLoader, text_bundle: Path) -> None:
    def versions(registry: ModelRegistry, caller: str) -> set[str]:
        found = set()
        for _ in range(30):
            with registry.resolve("m", Caller(caller)) as lease:
                found.add(lease.model.version)
        return found

    async def scenario() -> None:
        registry = ModelRegistry(loader=loader)
        await registry.load(LoadRequest("m", text_bundle)).loaded()
        await registry.load(LoadRequest("m", text_bundle, weight=0.5, sticky=True)).loaded()
        chosen = [versions(registry, f"caller-{number}") for number in range(40)]
        assert all(len(each) == 1 for each in chosen)
        assert {version for each in chosen for version in each} == {"1", "2"}
        assert versions(registry, "anonymous") == {"1", "2"}  # anybody, and so nobody
        registry.set_weights("m", {"1": 0.5, "2": 0.5}, sticky=False)
        assert any(len(versions(registry, f"caller-{number}")) == 2 for number in range(10))
        await registry.close()

    asyncio.run(scenario())


def test_what_was_replaced_takes_over_again_while_it_is_kept(loader: HashLoader, text_bundle: Path) -> None:
    async def scenario() -> None:
        registry = ModelRegistry(loader=loader, keep_previous=True)
        first = await registry.load(LoadRequest("m", text_bundle)).loaded()
        with pytest.raises(Conflict, match="no way back"):
            registry.rollback("m")
        second = await registry.load(LoadRequest("m", text_bundle, replace=True)).loaded()
        for expected in (first, second, first):
            registry.rollback("m")
            with registry.resolve("m") as lease:
                assert lease.model is expected
        # Version 1 serves, and is what the third one replaces: version 2 is not kept.
        dropped = registry.get("m").versions["2"]
        await registry.load(LoadRequest("m", text_bundle, replace=True)).loaded()
        await dropped.gone()
        assert list(registry.get("m").versions) == ["1", "3"]
        others = list(registry.get("m").versions.values())
        await registry.load(LoadRequest("m", text_bundle, replace=True, keep_previous=False)).loaded()
        await asyncio.gather(*(other.gone() for other in others))
        assert list(registry.get("m").versions) == ["4"]
        with pytest.raises(Conflict, match="not loaded any more"):
            registry.rollback("m")
        await registry.close()

    asyncio.run(scenario())


def test_unloading_waits_for_those_who_use_the_model(loader: HashLoader, text_bundle: Path) -> None:
    async def scenario() -> None:
        registry = ModelRegistry(loader=loader)
        model = await registry.load(LoadRequest("m", text_bundle)).loaded()
        lease = registry.resolve("m")
        (version,) = registry.unload("m")
        with pytest.raises(Unavailable, match="being unloaded") as caught:
            registry.resolve("m")
        assert caught.value.code == "model_unloading"
        output = await ask(model, "late")
        assert output.outputs[0].finish_reason == "length" and version.model is model
        lease.release()
        lease.release()
        await version.gone()
        assert version.model is None and not registry.deployments
        assert not any(loop.is_running for loop in model.loops)

    asyncio.run(scenario())


def test_unloading_ends_what_takes_too_long(loader: HashLoader, text_bundle: Path) -> None:
    async def scenario() -> None:
        registry = ModelRegistry(loader=loader, drain_timeout=0.0)
        model = await registry.load(LoadRequest("m", text_bundle)).loaded()
        lease = registry.resolve("m")
        request = asyncio.create_task(ask(model, "endless", max_tokens=240))
        await asyncio.sleep(0)
        (version,) = registry.unload("m")
        with pytest.raises(Unavailable, match="was unloaded") as caught:
            await request
        assert caught.value.code == "model_unloading"
        await version.gone()
        with pytest.raises(Unavailable):  # whoever held it until now is told the same
            await ask(model, "late")
        assert not model.llm.engine.has_unfinished and model.totals.kv_blocks_used == 0
        lease.release()

    asyncio.run(scenario())


def test_closing_ends_what_is_being_unloaded_already(loader: HashLoader, text_bundle: Path) -> None:
    async def scenario() -> None:
        registry = ModelRegistry(loader=loader)
        await registry.load(LoadRequest("m", text_bundle)).loaded()
        lease = registry.resolve("m")
        await registry.load(LoadRequest("m", text_bundle, replace=True)).loaded()
        assert [version.state for version in registry.get("m").versions.values()] == ["unloading", "ready"]
        await registry.close()
        assert not registry.deployments
        lease.release()

    asyncio.run(scenario())


def test_a_load_that_nobody_waits_for_any_more_is_dropped(loader: HashLoader, text_bundle: Path) -> None:
    async def scenario() -> None:
        registry = ModelRegistry(loader=loader)
        loader.held = threading.Event()
        loading = registry.load(LoadRequest("m", text_bundle))
        queued = registry.load(LoadRequest("n", text_bundle))
        await asyncio.to_thread(loader.begun.wait, 30)
        registry.unload("n")
        registry.unload("m")
        loader.held.set()
        await asyncio.gather(loading.gone(), queued.gone())
        assert not registry.deployments and len(loader.paths) == 1

    asyncio.run(scenario())


def test_one_version_can_be_unloaded_but_not_the_one_that_serves(loader: HashLoader, text_bundle: Path) -> None:
    async def scenario() -> None:
        registry = ModelRegistry(loader=loader)
        await registry.load(LoadRequest("m", text_bundle)).loaded()
        await registry.load(LoadRequest("m", text_bundle, weight=0.0)).loaded()
        with pytest.raises(Conflict, match="all the traffic"):
            registry.unload("m", "1")
        (version,) = registry.unload("m", "2")
        await version.gone()
        (version,) = registry.unload("m", "1")
        await version.gone()
        assert not registry.deployments

    asyncio.run(scenario())


def test_replicas_share_the_work_evenly(loader: HashLoader, text_bundle: Path) -> None:
    async def scenario() -> None:
        registry = ModelRegistry(loader=loader)
        model = await registry.load(LoadRequest("m", text_bundle, options=ModelOptions(replicas=3))).loaded()
        assert len(model.loops) == 3 and len({id(loop.shared) for loop in model.loops}) == 3
        await asyncio.gather(*(ask(model, str(number), max_tokens=20) for number in range(12)))
        finished = [loop.stats.num_finished_requests for loop in model.loops]
        assert finished == [4, 4, 4]
        assert model.totals.generated_tokens == 240 and model.totals.kv_blocks == 3 * model.loops[0].stats.num_kv_blocks
        await registry.close()

    asyncio.run(scenario())


def test_the_server_is_ready_when_every_required_model_is(loader: HashLoader, text_bundle: Path) -> None:
    async def scenario() -> None:
        registry = ModelRegistry(loader=loader)
        version = registry.load(LoadRequest("m", text_bundle, required=True))
        assert registry.missing == {"m": "version 1 is queued"}
        await version.loaded()
        assert not registry.missing
        loader.failure = BundleError("damaged")
        extra = registry.load(LoadRequest("extra", text_bundle))
        assert not registry.missing
        with pytest.raises(BundleError):
            await extra.loaded()
        assert not registry.missing
        needed = registry.load(LoadRequest("needed", text_bundle, required=True))
        with pytest.raises(BundleError):
            await needed.loaded()
        assert registry.missing == {"needed": "version 1 is failed: damaged"}
        await registry.close()

    asyncio.run(scenario())


def test_an_observer_that_fails_holds_up_no_model(
    loader: HashLoader, text_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Events):
        def model_loaded(self, model: ServedModel, seconds: float) -> None:
            super().model_loaded(model, seconds)
            raise OSError("no measurements today")

        def model_unloaded(self, model: ServedModel) -> None:
            super().model_unloaded(model)
            raise OSError("no measurements today")

    async def scenario() -> None:
        broken, sound = Broken(), Events()
        registry = ModelRegistry(loader=loader, observers=[broken, sound])
        await registry.load(LoadRequest("m", text_bundle)).loaded()
        with registry.resolve("m") as lease:
            await ask(lease.model, "r")
        await asyncio.wait_for(registry.close(), 30)
        assert broken.told == sound.told == ["loaded m@1", "unloaded m@1"]

    asyncio.run(scenario())
    assert "no measurements today" in caplog.text


def test_a_step_that_waits_for_what_does_not_come_is_given_up_when_its_model_is_unloaded(
    loader: HashLoader, text_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as for a process that was stopped; requests go to the replica that can answer, as long as there is one."""
    monkeypatch.setattr(served_module, "_STEP_PATIENCE", 0.01)
    given_up = threading.Event()

    async def scenario() -> None:
        registry = ModelRegistry(loader=loader)
        model = await registry.load(LoadRequest("m", text_bundle, ModelOptions(replicas=2))).loaded()
        first, second = (loop.shared.engine.executable for loop in model.loops)
        step, begun = first.step, threading.Event()

        def hang(batch: Any) -> Any:
            begun.set()
            assert given_up.wait(30)
            return step(batch)

        monkeypatch.setattr(first, "step", hang)
        for executable in (first, second):
            monkeypatch.setattr(executable, "failure", None, raising=False)
            monkeypatch.setattr(executable, "abandon", lambda reason: given_up.set(), raising=False)
        request = model.llm.engine.prepare("r", [1, 2], SamplingParams(max_tokens=1))
        model.loops[0].submit(request, lambda arrival: None, every_step=False)
        assert await asyncio.to_thread(begun.wait, 30)
        assert model.failure is None
        monkeypatch.setattr(first, "failure", "rank 1 has failed")
        assert model.failure is None
        assert {model.pick() for _ in range(4)} == {model.loops[1]}
        monkeypatch.setattr(second, "failure", "rank 1 has failed")
        assert model.failure == "rank 1 has failed"
        await registry.close()
        assert given_up.is_set()

    asyncio.run(scenario())

"""A real bundle is loaded, warmed up, replaced under load, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path

import pytest

from inferencex.formats.errors import BackendError, BundleError, OptionError
from inferencex.runtime.server.models import loading
from inferencex.runtime.server.models.available_memory import AvailableMemory
from inferencex.runtime.server.models.loading import load_replicas
from inferencex.runtime.server.models.options import ModelOptions
from inferencex.runtime.server.models.registry import ModelRegistry
from inferencex.runtime.server.models.version import LoadRequest
from tests.runtime.server.models.hash_loader import ask

OPTIONS = ModelOptions(threads=1, max_num_seqs=4)


def test_replicas_are_loaded_and_warm(tiny_bundle: Path) -> None:
    told: list[tuple[str, float]] = []
    loaded = load_replicas(tiny_bundle, ModelOptions(replicas=2, threads=1), lambda *step: told.append(step))
    assert told == [("loading", 0.0), ("warming", 0.0), ("loading", 0.5), ("warming", 0.5)]
    assert [llm.stats.num_generated_tokens for llm in loaded.llms] == [2, 2]
    assert loaded.memory is not None and loaded.memory.replicas == 2


@pytest.mark.parametrize("limit", [{"max_model_len": 2}, {"max_model_len": 3}, {"num_kv_blocks": 1, "block_size": 2}])
def test_the_smallest_models_are_warmed_up_too(tiny_bundle: Path, limit: dict[str, int]) -> None:
    (llm,) = load_replicas(tiny_bundle, ModelOptions(threads=1, **limit), lambda *step: None).llms  # type: ignore[arg-type]
    assert llm.stats.num_finished_requests == 1


def test_a_cold_start_can_be_chosen(tiny_bundle: Path) -> None:
    (llm,) = load_replicas(tiny_bundle, ModelOptions(threads=1, warm_up=False), lambda *step: None).llms
    assert llm.stats.num_steps == 0


def test_what_cannot_be_loaded_says_why(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BundleError, match="not a folder"):
        load_replicas(tmp_path / "none", OPTIONS, lambda *step: None)
    with pytest.raises(OptionError, match="replicas=0"):
        ModelOptions(replicas=0)
    monkeypatch.setattr(loading, "available_memory", lambda: AvailableMemory(10_000, 10**9, "a small machine"))
    with pytest.raises(BackendError, match="a small machine"):
        load_replicas(tiny_bundle, OPTIONS, lambda *step: None)


def test_a_bundle_is_replaced_while_it_answers(tiny_bundle: Path) -> None:
    async def scenario() -> None:
        registry = ModelRegistry()
        first = await registry.load(LoadRequest("m", tiny_bundle, OPTIONS)).loaded()
        assert first.totals.generated_tokens == 0  # the warm-up's are not counted
        expected = (await ask(first, "alone", 20)).outputs[0].token_ids
        second = registry.load(LoadRequest("m", tiny_bundle, OPTIONS, replace=True))
        answers = 0
        while second.state != "ready" or answers < 20:
            with registry.resolve("m") as lease:
                assert (await ask(lease.model, str(answers), 20)).outputs[0].token_ids == expected
            answers += 1
        assert second.load_seconds is not None and second.memory is not None
        old = next(iter(registry.get("m").versions.values()))
        if old is not second:
            await old.gone()
        assert not any(loop.is_running for loop in first.loops)
        assert first.totals.running == first.totals.waiting == first.totals.kv_blocks_used == 0
        memory = weakref.ref(first.llm.engine.executable)
        del first, lease
        gc.collect()
        assert memory() is None
        await registry.close()

    asyncio.run(scenario())

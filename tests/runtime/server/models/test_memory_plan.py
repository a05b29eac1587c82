"""What a bundle takes is known before it is taken, and what does not fit is refused with the numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from inferencex.formats.errors import BackendError
from inferencex.runtime import LLM
from inferencex.runtime.server.models.available_memory import AvailableMemory
from inferencex.runtime.server.models.memory_plan import MemoryPlan, fit, plan_memory
from inferencex.runtime.server.models.options import ModelOptions

PLAN = MemoryPlan(replicas=2, weights=400, kv_cache=1000, step=100, smallest_kv_cache=200)
AUTO = ModelOptions(replicas=2)


def memory(room: int) -> AvailableMemory:
    return AvailableMemory(room * 20 // 19 + 1, 10**6, "the limit of a test")


def test_the_plan_of_a_bundle_is_what_loading_it_makes(tiny_bundle: Path) -> None:
    options = ModelOptions(max_num_seqs=4, threads=1)
    plan = plan_memory(tiny_bundle, options)
    engine = LLM(tiny_bundle, **options.llm_arguments()).engine
    assert plan.kv_cache == engine.limits.num_slots * engine.executable.facts.bytes_per_token > 0
    assert 0 < plan.smallest_kv_cache <= plan.kv_cache and plan.step > 0
    stored = sum(file.stat().st_size for file in tiny_bundle.glob("*.safetensors"))
    assert 0.5 * stored < plan.weights <= stored
    assert plan.total == plan.weights + plan.kv_cache + plan.step
    twice = plan_memory(tiny_bundle, replace(options, replicas=2))
    assert twice.total == 2 * plan.total and "2 replicas" in twice.describe()


def test_a_backend_that_does_not_plan_is_known_by_its_files(tiny_bundle: Path) -> None:
    plan = plan_memory(tiny_bundle, ModelOptions(backend="reference", kv_cache_memory=5000))
    assert plan.weights == sum(file.stat().st_size for file in tiny_bundle.glob("*.safetensors"))
    assert (plan.kv_cache, plan.step) == (5000, 0)


def test_what_fits_is_loaded_as_asked() -> None:
    assert fit("m", PLAN, AUTO, memory(1500)) == (PLAN, AUTO)


def test_a_cache_whose_size_nobody_chose_is_made_to_fit() -> None:
    plan, options = fit("m", PLAN, AUTO, memory(900))
    assert plan.kv_cache == 401 and options.kv_cache_memory == 200 and plan.total == 901


def test_ranks_on_devices_of_their_own_are_told_the_total_of_their_caches() -> None:
    """The plan counts what one device takes; `kv_cache_memory` is divided among the ranks."""
    device = AvailableMemory(memory(900).available, 10**6, "cuda:0")
    plan, options = fit("m", replace(PLAN, device=device), replace(AUTO, tensor_parallel_size=4), memory(0))
    assert plan.kv_cache == 401 and options.kv_cache_memory == 800


@pytest.mark.parametrize(
    ("options", "room", "hints"),
    [
        (AUTO, 650, ["lower max_model_len", "fewer replicas than 2", "unload another"]),
        (AUTO, 450, ["lower max_model_len"]),
        (replace(AUTO, kv_cache_memory=500), 1200, ["kv_cache_memory of at most 350 bytes"]),
        (replace(AUTO, num_kv_blocks=5), 1200, ["kv_cache_memory of at most 350 bytes"]),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_lower(options: ModelOptions, room: int, hints: list[str]) -> None:
    with pytest.raises(BackendError, match=r"weights 0\.0 MB, KV cache 0\.0 MB") as caught:
        fit("m", PLAN, options, memory(room))
    for hint in (*hints, "the limit of a test"):
        assert hint in str(caught.value)

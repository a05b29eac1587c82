"""Tuning covers what a bundle launches, which is then launched as was chosen; a cache of no use changes nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton

from inferencex.formats.errors import BackendError
from inferencex.runtime.backends.base import BackendOptions
from inferencex.runtime.backends.triton import TritonBackend, tune
from inferencex.runtime.backends.triton.tuning import Config, Tuner, bucket_of, cache
from inferencex.runtime.backends.triton.tuning.cache import TuningCache, cache_path, current_cache, read_again
from tests import triton_kernels
from tests.runtime.backends.triton.test_executable import prompts_batch, step_batch

OPTIONS = BackendOptions(num_blocks=24, block_size=4, activation_dtype="float16", kv_cache_dtype="float16")
KERNELS = {
    "int4": ("qwen2", "rtn-int4", {"quantized_linear", "decode_attention", "prefill_attention"}),
    "int8": ("qwen2", "int8-dynamic", {"scaled_linear", "decode_attention", "prefill_attention"}),
    "experts": (
        "mixtral", "rtn-int4", {"quantized_linear", "grouped_linear", "decode_attention", "prefill_attention"}
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=list(KERNELS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def bundle(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.architectures.comparison import write_bundle
    from tests.architectures.shrink import tiny_config
    from tests.architectures.zoo import tiny_model

    name, quantization, _ = KERNELS[kind]
    return write_bundle(tiny_model(name), tiny_config(name), tmp_path_factory.mktemp(kind), quantization=quantization)


def last_candidate() -> Callable[[Callable[[], Any]], float]:
    """Return a clock by which each candidate is faster than those before."""
    readings: Iterator[float] = iter(range(10**6, 0, -1))
    return lambda run: next(readings)


def logits(bundle: Path) -> list[np.ndarray]:
    executable = TritonBackend().compile(bundle, OPTIONS)
    return [executable.step(prompts_batch()), executable.step(step_batch([(5, 6), (1, 2), (3, 4)], [7, 8, 9]))]


@pytest.mark.skipif(triton_kernels.device() == "cuda", reason="what is chosen by a made-up clock may not fit a GPU")
def test_all_that_is_launched_is_tuned_and_launched_so(
    bundle: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = logits(bundle)
    tuner = Tuner(timer=last_candidate())
    chosen = list(tune.tune_bundle(bundle, OPTIONS, (3, 9), tuner=tuner))
    assert {found.kernel for found in chosen} == KERNELS[kind][2]
    assert len({(found.kernel, found.shape_class) for found in chosen}) == len(chosen)
    read_again()
    asked: dict[tuple[str, str], Config] = {}
    real = cache.TuningCache.get

    def get(self: TuningCache, kernel: str, shape_class: str) -> Config | None:
        found = real(self, kernel, shape_class)
        assert found is not None, f"{kernel} for {shape_class} is launched, and was not tuned"
        asked[kernel, shape_class] = found
        return found

    monkeypatch.setattr(TuningCache, "get", get)
    tuned = logits(bundle)
    assert {kernel for kernel, _ in asked} == KERNELS[kind][2]
    assert asked.items() <= {(found.kernel, found.shape_class): found.config for found in chosen}.items()
    for before, after in zip(usual, tuned, strict=True):
        np.testing.assert_allclose(after, before, atol=5e-3 * float(np.abs(before).max()))


def _rewritten(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_text(path.read_text()[:-20]),
        lambda path: _rewritten(path, device="Another GPU"),
        lambda path: _rewritten(path, triton="1.0"),
        lambda path: _rewritten(path, version=1),
    ],
    ids=["broken", "other device", "other Triton", "other version"],
)
def test_a_cache_of_no_use_is_one_line(
    tiny_bundle: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    usual = logits(tiny_bundle)
    list(tune.tune_bundle(tiny_bundle, OPTIONS, (3, 9), tuner=Tuner(timer=last_candidate())))
    path = current_cache().path
    assert "decode_attention" in path.read_text()
    spoil(path)
    read_again()
    with caplog.at_level(logging.WARNING):
        again = logits(tiny_bundle)
    assert len(caplog.records) == 1 and str(path) in caplog.text and "\n" not in caplog.records[0].message
    for before, after in zip(usual, again, strict=True):
        assert np.array_equal(before, after)


def test_what_is_there_is_not_measured_again(tiny_bundle: Path) -> None:
    first = list(tune.tune_bundle(tiny_bundle, OPTIONS, (1,), tuner=Tuner(timer=last_candidate())))
    read_again()

    def refuse(run: Callable[[], Any]) -> float:
        raise AssertionError("measured again")

    assert list(tune.tune_bundle(tiny_bundle, OPTIONS, (1,), tuner=Tuner(timer=refuse))) == first
    with pytest.raises(AssertionError, match="measured again"):
        list(tune.tune_bundle(tiny_bundle, OPTIONS, (1,), tuner=Tuner(timer=refuse, again=True)))


def test_what_is_measured_runs(bundle: Path) -> None:
    """Every candidate of every kernel is launched once, over shapes of the bundle."""
    runs: list[None] = []

    def timer(run: Callable[[], Any]) -> float:
        if len(runs) % 9 == 0:  # the interpreter is slow; what choices give is seen elsewhere
            run()
        runs.append(None)
        return 1.0

    options = replace(OPTIONS, max_model_len=20)
    list(tune.tune_bundle(bundle, options, (3,), tuner=Tuner(timer=timer)))
    assert len(runs) > 50


@pytest.mark.skipif(triton_kernels.device() == "cuda", reason="a GPU can be measured")
def test_the_interpreter_measures_nothing(tiny_bundle: Path) -> None:
    with pytest.raises(BackendError, match="tuning needs a GPU"):
        list(tune.tune_bundle(tiny_bundle))
    assert triton.knobs.runtime.interpret and tune.tuning_path() == cache_path(cache.INTERPRETER)


def test_the_largest_step_is_measured_where_nobody_asks_for_another() -> None:
    """Prompts are read in steps of it."""
    assert bucket_of(BackendOptions().max_num_batched_tokens) in tune.DEFAULT_TOKENS

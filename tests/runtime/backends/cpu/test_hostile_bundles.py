"""Whatever a bundle says, it is refused in words or runs: never a crash, nor an error that is not the project's.

`make fuzz` tries more, at random; `make test` always tries the same.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="needs the extra inferencex[convert]")

from tests.architectures.comparison import write_bundle
from tests.architectures.shrink import tiny_config
from tests.architectures.zoo import tiny_model
from tests.runtime.backends.cpu.bundle_runner import BundleRunner
from tests.runtime.backends.cpu.mutations import Parts, spoil

_EXAMPLES = int(os.environ.get("INFERENCEX_FUZZ_EXAMPLES", "0"))
# Architecture and scheme; gpt-oss has experts, windows, sinks and biases.
_SOURCES = [("llama", "rtn-int4"), ("llama", "none"), ("gpt_oss", "rtn-int4")]
_MORE = [
    *[("gemma2", "rtn-int8"), ("bloom", "rtn-int4"), ("deepseek_v3", "rtn-int4")],
    *[("qwen3_moe", "none"), ("gptj", "none")],
    *[
        ("llama", "rtn-int3"),
        ("qwen3_moe", "rtn-int3"),
        ("llama", "rtn-int5"),
        ("gpt_oss", "nvfp4"),
        ("llama", "mxfp4"),
    ],
    *[("llama", "int8-dynamic"), ("qwen3_moe", "fp8")],
]


_fuzzing = settings(
    max_examples=_EXAMPLES or 120,
    derandomize=not _EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@dataclass(frozen=True)
class Target:
    """A valid bundle in memory, and the folder that its spoilt versions are written to."""

    parts: Parts = field(repr=False)
    folder: Path


@pytest.fixture(scope="module", params=_SOURCES + (_MORE if _EXAMPLES else []), ids="-".join)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    name, quantization = request.param
    folder = tmp_path_factory.mktemp(name)
    bundle = write_bundle(tiny_model(name), tiny_config(name), folder, quantization)
    yield Target(Parts.read(bundle), bundle)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def runner() -> Iterator[BundleRunner]:
    with BundleRunner() as process:
        yield process


def test_the_valid_bundle_runs(target: Target, runner: BundleRunner) -> None:
    target.parts.copy().write(target.folder)
    for activation_dtype in ("auto", "float32"):
        outcome = runner.run(target.folder, activation_dtype=activation_dtype, threads=2)
        assert outcome.what == "ran", outcome.text


@_fuzzing
@given(data=st.data())
def test_a_spoilt_bundle_runs_or_is_refused(target: Target, runner: BundleRunner, data: st.DataObject) -> None:
    parts = target.parts.copy()
    for _ in range(data.draw(st.sampled_from([1, 1, 1, 2, 3]))):
        note(spoil(parts, data))
    options = {
        "activation_dtype": data.draw(st.sampled_from(["auto", "float32"])),
        "kv_cache_dtype": data.draw(st.sampled_from(["auto", "float16", "int8"])),
        "threads": data.draw(st.sampled_from([1, 2])),
    }
    parts.write(target.folder)
    outcome = runner.run(target.folder, **options)
    assert outcome.what in ("ran", "refused"), f"{outcome.what}: {outcome.text}"
    if outcome.what == "refused":
        assert len(outcome.text) > 20 and "Traceback" not in outcome.text, outcome.text


@_fuzzing
@given(seed=st.integers(0, 2**32 - 1), threads=st.sampled_from([1, 2]))
def test_a_spoilt_program_runs_or_is_refused(target: Target, runner: BundleRunner, seed: int, threads: int) -> None:
    target.parts.copy().write(target.folder)
    outcome = runner.run(target.folder, spoil=seed, threads=threads)
    assert outcome.what in ("ran", "refused"), f"{outcome.what}: {outcome.text}"

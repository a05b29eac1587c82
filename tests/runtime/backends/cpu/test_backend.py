"""The CPU backend as a whole: options, logs, fallbacks, fixed scales, refused batches, listings and profiles."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

pytest.importorskip("transformers", reason="needs the extra inferencex[convert]")

from inferencex.formats.bundle import Bundle
from inferencex.formats.errors import BackendError, OptionError
from inferencex.runtime.backends import select_backend
from inferencex.runtime.backends.base import BackendOptions, StepBatch
from inferencex.runtime.backends.cpu import CpuBackend
from inferencex.runtime.backends.cpu.backend import lower_bundle
from inferencex.runtime.backends.cpu.listing import MachineLimits, program_lines
from tests.architectures.comparison import write_bundle
from tests.architectures.shrink import tiny_config
from tests.architectures.zoo import tiny_model
from tests.runtime.backends.reference.steps import Model, compiled_cpu, initializer

FEATURES = 8


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backend")
    return write_bundle(tiny_model("qwen2"), tiny_config("qwen2"), folder, "rtn-int4")


def _batch(tokens: int, **changes: Any) -> StepBatch:
    batch = StepBatch(
        token_ids=np.arange(tokens, dtype=np.int32),
        positions=np.arange(tokens, dtype=np.int32),
        sequence_offsets=np.array([0, tokens], np.int32),
        context_lengths=np.array([tokens], np.int32),
        block_tables=np.arange(4, dtype=np.int32)[None],
        logit_rows=np.arange(tokens, dtype=np.int32),
        prompt_lengths=np.full(tokens, tokens, np.int32),
    )
    return replace(batch, **changes)


def _around(operate: Callable[[Model, ir.Value], ir.Value]) -> ir.Model:
    m = Model()
    return m.finish(operate(m, m.embed(FEATURES)), FEATURES)


def test_it_is_the_default(bundle: Path) -> None:
    assert select_backend("auto", bundle).name == "cpu"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_dtype": "int4"}, "activation_dtype='int4'; expected one of auto, int8, float32"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype='int4'; expected one of auto, float32"),
        (
            {"kv_cache_dtype": "fp8"},
            "this bundle has no scales for its KV cache; convert the model with --kv-cache fp8",
        ),
    ],
)
def test_unknown_types_are_refused(bundle: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        CpuBackend().compile(bundle, BackendOptions(**change))


def test_an_unknown_instruction_set_is_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERENCEX_ISA", "mmx")
    with pytest.raises(BackendError, match=r"INFERENCEX_ISA=mmx is not among what this machine runs: .*baseline"):
        CpuBackend().compile(bundle, BackendOptions(num_blocks=8))


def test_keys_and_values_take_what_their_type_takes(bundle: Path) -> None:
    sizes = {
        kind: lower_bundle(Bundle.open(bundle), BackendOptions(num_blocks=8, kv_cache_dtype=kind)).facts.bytes_per_token
        for kind in ("float32", "float16", "bfloat16", "int8", "auto")
    }
    assert sizes["float32"] == 2 * sizes["float16"] == 2 * sizes["bfloat16"]
    assert sizes["int8"] < sizes["float16"]
    assert sizes["auto"] == sizes["bfloat16"], "this bundle's linears read INT8 activations"
    plain = BackendOptions(num_blocks=8, activation_dtype="float32")
    assert lower_bundle(Bundle.open(bundle), plain).facts.bytes_per_token == sizes["float32"]


def test_the_load_log_says_what_reuse_saves(bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        CpuBackend().compile(bundle, BackendOptions(num_blocks=8, threads=1))
    assert "reuse saves" in caplog.text and "onnx.reference" not in caplog.text


def test_an_operator_without_a_kernel_runs_and_is_named() -> None:
    executable = compiled_cpu(_around(lambda m, x: m.node("Celu", x, shape=["tokens", FEATURES], alpha=2.0)))
    plain = compiled_cpu(_around(lambda m, x: x))
    assert executable.lowered.fallbacks == ("Celu",)
    x = plain.step(_batch(5))
    expected = np.maximum(x, 0) + np.minimum(0, 2.0 * (np.exp(x / 2.0) - 1))
    np.testing.assert_allclose(executable.step(_batch(5)), expected, rtol=1e-6)


def test_a_failing_operator_is_named_and_the_next_step_runs() -> None:
    executable = compiled_cpu(_around(lambda m, x: m.node("NoSuchOperator", x, shape=["tokens", FEATURES])))
    for _ in range(2):
        with pytest.raises(BackendError, match=r"NoSuchOperator .* cannot be executed"):
            executable.step(_batch(3))


def test_fixed_scales_in_the_graph_run_on_integers() -> None:
    """QuantizeLinear and DequantizeLinear in front of an INT8 linear: what the graph says, computed exactly."""
    rng = np.random.default_rng(3)
    weight = rng.integers(-127, 128, (FEATURES, FEATURES), dtype=np.int8)
    scales = rng.uniform(0.001, 0.01, FEATURES).astype(np.float32)

    def operate(m: Model, x: ir.Value) -> ir.Value:
        step = initializer(m.graph, "x.scale", np.array(0.02, np.float32))
        zero = initializer(m.graph, "x.zero", np.array(0, np.int8))
        q = m.node("QuantizeLinear", x, step, zero, shape=["tokens", FEATURES])
        q.type = ir.TensorType(ir.DataType.INT8)
        x = m.node("DequantizeLinear", q, step, zero, shape=["tokens", FEATURES])
        w = m.node(
            "DequantizeLinear",
            initializer(m.graph, "weight", weight),
            initializer(m.graph, "weight.scales", scales),
            shape=[FEATURES, FEATURES],
            axis=0,
        )
        return m.node("Gemm", x, w, shape=["tokens", FEATURES], transB=1)

    executable = compiled_cpu(_around(operate), integer_activations=True)
    kinds = [instruction.kind for instruction in executable.lowered.instructions]
    assert "Quantize" in kinds and "IntegerLinear" in kinds and not executable.lowered.fallbacks
    x = compiled_cpu(_around(lambda m, x: x)).step(_batch(6))
    rounded = np.clip(np.rint(x / np.float32(0.02)), -128, 127) * 0.02
    expected = rounded @ (weight * scales[:, None].astype(np.float64)).T
    np.testing.assert_allclose(executable.step(_batch(6)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_tables": np.array([[99, 1, 2, 3]], np.int32)}, "block 99 of a pool of 24"),
        ({"block_tables": np.array([[-1, 1, 2, 3]], np.int32)}, "block -1 of a pool of 24"),
        ({"positions": np.array([0, 1, 5], np.int32)}, "positions of sequence 0"),
        ({"context_lengths": np.array([2], np.int32)}, "more new tokens than context"),
        ({"context_lengths": np.array([60], np.int32)}, "beyond its block table"),
        ({"context_lengths": np.array([400], np.int32)}, "400 tokens is longer than max_model_len=64"),
        ({"sequence_offsets": np.array([0, 2], np.int32)}, "do not span"),
        (
            {
                "sequence_offsets": np.array([0, 16, 3], np.int32),
                "context_lengths": np.array([16, 3], np.int32),
                "block_tables": np.zeros((2, 4), np.int32),
            },
            "do not ascend",
        ),
        ({"logit_rows": np.array([3], np.int32)}, "a logit row is outside"),
        ({"prompt_lengths": np.array([3], np.int32)}, "lengths that contradict each other"),
    ],
)
def test_batches_that_contradict_themselves_are_refused(change: dict[str, Any], message: str) -> None:
    m = Model()
    executable = compiled_cpu(m.finish(m.attention(0, *m.keys()), 20))
    with pytest.raises(BackendError, match=message):
        executable.step(_batch(3, **change))
    assert executable.step(_batch(3)).shape == (3, 20)


def test_a_step_beyond_what_it_was_compiled_for_is_refused() -> None:
    executable = compiled_cpu(_around(lambda m, x: x))
    with pytest.raises(BackendError, match="65 tokens; this program was compiled for 1 to 64"):
        executable.step(
            _batch(
                65,
                positions=np.array([*range(33), *range(32)], np.int32),
                sequence_offsets=np.array([0, 33, 65], np.int32),
                context_lengths=np.array([33, 32], np.int32),
                block_tables=np.arange(18, dtype=np.int32).reshape(2, 9),
            )
        )


def test_a_fork_is_told_so() -> None:
    executable = compiled_cpu(_around(lambda m, x: x))
    executable._process -= 1
    with pytest.raises(BackendError, match="do not survive a fork"):
        executable.step(_batch(2))


def test_the_listing_names_every_operation(bundle: Path) -> None:
    program = lower_bundle(Bundle.open(bundle), BackendOptions(num_blocks=8)).program
    lines = list(program_lines(program))
    assert len(lines) == len(program.instructions) + 1
    for instruction, line in zip(program.instructions, lines, strict=False):
        assert f"= {instruction.kind}(" in line
    assert "less than side by side" in lines[-1]


def test_a_profile_accounts_for_every_step(bundle: Path) -> None:
    executable = CpuBackend().compile(bundle, BackendOptions(num_blocks=8, threads=2))
    executable.step(_batch(3))
    executable.set_profiling(True)
    began, inside = time.perf_counter(), executable.native_seconds
    for _ in range(3):
        executable.step(_batch(3))
    elapsed, inside = time.perf_counter() - began, executable.native_seconds - inside
    profile = executable.profile()
    assert {operation.calls for operation in profile} == {3}
    assert 0 < sum(operation.seconds for operation in profile) <= inside <= elapsed
    linears = [operation for operation in profile if operation.kind == "IntegerLinear"]
    assert linears and all(operation.operations > 0 and operation.bytes > 0 for operation in linears)
    table = "\n".join(executable.profile_lines())
    assert "IntegerLinear" in table and "limits of this machine" in table


def test_the_limits_of_the_machine_are_plausible() -> None:
    limits = MachineLimits.measured(1)
    assert 1e8 < limits.bytes < 1e13 and 1e9 < limits.integer_operations < 1e14


def test_an_idle_program_takes_no_processor_time(bundle: Path) -> None:
    executable = CpuBackend().compile(bundle, BackendOptions(num_blocks=8, threads=4))
    executable.step(_batch(3))
    deadline = time.monotonic() + 0.05
    while time.monotonic() < deadline:  # the threads look for work for a moment, then sleep
        pass
    before = os.times()
    began = time.monotonic()
    threading.Event().wait(0.2)
    after = os.times()
    used = after.user + after.system - before.user - before.system
    assert used < 0.5 * (time.monotonic() - began)

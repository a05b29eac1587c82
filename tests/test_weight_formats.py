"""Every format of weights and activations on a trained model: from its name to a bundle, and on both backends."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest import mock

import numpy as np
import onnx
import pytest
import torch
from filelock import FileLock
from numpy.typing import NDArray

pytest.importorskip("transformers", reason="needs the extra inferencex[convert]")

from inferencex.cli.inspect import describe
from inferencex.convert import fidelity
from inferencex.convert.pipeline import ConvertOptions, convert
from inferencex.convert.quantize import parse_scheme
from inferencex.formats import dialect
from inferencex.formats.bundle import Bundle
from inferencex.runtime.backends.base import BackendOptions, Executable, StepBatch
from inferencex.runtime.backends.cpu import CpuBackend
from inferencex.runtime.backends.cpu.native import _cpu
from inferencex.runtime.backends.reference import ReferenceBackend
from tests.architectures import zoo
from tests.smollm2 import Quiet

pytestmark = pytest.mark.shared

# scheme: (precision of head and embedding, largest mean KL from the source in nats, most bits a weight)
FORMATS = {
    "rtn-int3": ("int3", 2.0, 3.6),
    "rtn-int4": ("int4", 0.6, 4.6),
    "rtn-int5": ("int5", 0.2, 5.6),
    "rtn-int6": ("int6", 0.05, 6.6),
    "rtn-int8": ("int8", 0.005, 8.4),
    "int8-dynamic": ("int8", 0.01, 8.4),
    "fp8-weight": ("fp8", 0.04, 8.4),
    "fp8": ("fp8", 0.1, 8.4),
    "nvfp4": ("nvfp4", 0.5, 4.6),
    "mxfp4": ("mxfp4", 0.8, 4.4),
}
TOKENS = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("formats")


def _bundle(folder: Path, source: Path, scheme: str) -> Path:
    """Return a bundle of a checkpoint, head and embedding quantized too, converted once."""
    path = folder / f"{source.name}-{scheme}"
    kind = FORMATS[scheme][0]
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            parsed = parse_scheme(scheme, lm_head=kind, embedding=kind)
            convert(ConvertOptions(str(source), path, parsed, verify_tokens=TOKENS, threads=1), Quiet())
    return path


def _step(tokens: int) -> StepBatch:
    return StepBatch(
        token_ids=(np.arange(tokens, dtype=np.int32) * 37 + 11) % 200,
        positions=np.arange(tokens, dtype=np.int32),
        sequence_offsets=np.array([0, tokens], np.int32),
        context_lengths=np.array([tokens], np.int32),
        block_tables=np.arange(4, dtype=np.int32)[None],
        logit_rows=np.arange(tokens, dtype=np.int32),
        prompt_lengths=np.full(tokens, tokens, np.int32),
    )


def _divergence(reference: NDArray[np.float32], executable: Executable, tokens: int = TOKENS) -> float:
    logits = torch.from_numpy(executable.step(_step(tokens)).copy())
    return fidelity.compare_logits(torch.from_numpy(reference), logits, torch.zeros(tokens, dtype=torch.int64)).mean_kl


@pytest.mark.parametrize("scheme", FORMATS)
def test_a_trained_model_stays_itself(
    shared_data: Path, folder: Path, scheme: str, record_property: pytest.RecordProperty
) -> None:
    _, largest, bits = FORMATS[scheme]
    path = _bundle(folder, shared_data / "stories260k", scheme)
    found = json.loads((path / "report.json").read_text())["fidelity"]["mean_kl"]
    print(f"{scheme}: mean KL {found:.5f} nats per token")
    record_property("mean_kl", found)
    assert found < largest
    bundle = Bundle.open(path, verify=True)
    dialect.register()
    onnx.checker.check_model(str(path / "model.onnx"), full_check=True)
    weights = describe(bundle)["weights"]
    (kind,) = (name for name in weights if name.endswith("(rtn)"))
    assert 8 * weights[kind]["bytes"] / weights[kind]["parameters"] < bits
    for name in bundle.manifest.quantization:
        assert np.isfinite(bundle.quantized(name).dequantize()).all()


# What the CPU backend adds: rounding of sums; with `auto`, INT8 activations in front of integer weights.
@pytest.mark.parametrize("activation_dtype", ["auto", "float32"])
@pytest.mark.parametrize("scheme", FORMATS)
def test_the_cpu_backend_computes_the_same(shared_data: Path, folder: Path, scheme: str, activation_dtype: str) -> None:
    path = _bundle(folder, shared_data / "stories260k", scheme)
    options = BackendOptions(num_blocks=4, block_size=16, threads=1, kv_cache_dtype="auto")
    reference = ReferenceBackend().compile(path, options).step(_step(TOKENS)).copy()
    chosen = BackendOptions(
        num_blocks=4, block_size=16, threads=1, activation_dtype=activation_dtype, kv_cache_dtype="float32"
    )
    explicit = scheme in ("int8-dynamic", "fp8")
    exact = activation_dtype == "float32" or scheme == "fp8-weight"
    for isa in _cpu.available_isas():
        with mock.patch.dict(os.environ, INFERENCEX_ISA=isa):
            executable = CpuBackend().compile(path, chosen)
        assert not executable.lowered.fallbacks and not executable.lowered.widened
        # Explicit quantization rounds sums that differ in their last bits to different integers, here and there.
        assert _divergence(reference, executable) < (1e-3 if explicit else 1e-8 if exact else 2e-3)
        alone, rows = executable.step(_step(1)).copy(), executable.step(_step(20))
        assert np.array_equal(alone[0], rows[0]), "a row does not depend on the others"


@pytest.mark.parametrize("scheme", ["rtn-int3", "rtn-int5", "rtn-int6", "int8-dynamic", "fp8", "nvfp4", "mxfp4"])
def test_experts_have_every_format(tmp_path: Path, scheme: str) -> None:
    model = zoo.tiny_model("qwen3_moe")
    model.config._attn_implementation = "eager"
    model.save_pretrained(tmp_path / "moe")
    path = _bundle(tmp_path, tmp_path / "moe", scheme)
    bundle = Bundle.open(path)
    stacked = [name for name, entry in bundle.manifest.quantization.items() if len(entry.shape) == 3]
    assert stacked
    reference = ReferenceBackend().compile(path, BackendOptions(num_blocks=4, block_size=16)).step(_step(9)).copy()
    options = BackendOptions(num_blocks=4, block_size=16, threads=2, activation_dtype="float32")
    executable = CpuBackend().compile(path, options)
    assert not executable.lowered.widened, "kernels read experts as they are stored"
    assert _divergence(reference, executable, 9) < 1e-3
    integers = CpuBackend().compile(path, BackendOptions(num_blocks=4, block_size=16, threads=2))
    assert not integers.lowered.widened
    assert _divergence(reference, integers, 9) < 0.02

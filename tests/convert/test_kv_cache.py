"""`--kv-cache`: scales of keys and values, calibrated, in the graph of the bundle, and what runs with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from inferencex.convert.calibrate.data import CalibrationOptions
from inferencex.convert.pipeline import ConvertOptions, Silent, convert
from inferencex.convert.quantize import parse_scheme
from inferencex.formats.bundle import Bundle
from inferencex.formats.errors import OptionError
from inferencex.formats.kv_cache import KVFormat, KVScales, kv_scales_by_layer
from inferencex.runtime.backends.base import BackendOptions
from inferencex.runtime.backends.cpu.backend import CpuBackend
from inferencex.runtime.backends.divergence import whole_sequence_logits, whole_sequence_options
from inferencex.runtime.backends.reference import attention
from inferencex.runtime.backends.reference.backend import ReferenceBackend
from tests.architectures.shrink import tiny_config
from tests.architectures.zoo import tiny_model

_SAMPLES = CalibrationOptions("random", samples=8, length=32, held_out=2)
_ARTIFACTS = ("weights-00001-of-00001.safetensors", "model.onnx", "bundle.json")


def _checkpoint(name: str, folder: Path) -> Path:
    tiny_model(name).save_pretrained(folder)  # type: ignore[operator]
    tiny_config(name).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _checkpoint("llama", tmp_path_factory.mktemp("model"))


def _options(checkpoint: Path, output: Path, scheme: str = "none", **changes: object) -> ConvertOptions:
    plain = ConvertOptions(
        str(checkpoint), output, parse_scheme(scheme), calibration=_SAMPLES, verify=False, max_model_len=64,
        kv_cache="int8",
    )  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]


def _scales(bundle: Path) -> dict[int, KVScales]:
    nodes = [node for node in Bundle.open(bundle).graph if node.op_type == "Attention"]
    return kv_scales_by_layer((n.attributes.get_int("layer"), n.attributes, n.outputs[0].name) for n in nodes)


def _logits(bundle: Path, backend: object, kv_cache_dtype: str) -> np.ndarray:
    tokens = np.random.default_rng(5).integers(0, 250, 30)
    options = whole_sequence_options(30, "float32", kv_cache_dtype)
    executable = backend.compile(bundle, options)  # type: ignore[attr-defined]
    return whole_sequence_logits(executable, tokens).copy()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("scheme", ["none", "rtn-int4-g16"])
def test_a_bundle_keeps_its_cache_as_it_was_calibrated(
    scheme: str, kind: str, checkpoint: Path, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    report = convert(_options(checkpoint, bundle, scheme, kv_cache=kind, verify=True), Silent())
    scales = _scales(bundle)
    config = tiny_config("llama")
    assert sorted(scales) == list(range(config.num_hidden_layers))
    assert all(len(one.keys) == len(one.values) == config.num_key_value_heads for one in scales.values())
    assert {one.format for one in scales.values()} == {kind}
    assert Bundle.open(bundle).manifest.scheme["kv_cache"] == kind
    most = {"int8": 0.01, "fp8": 0.04}[kind]
    assert report.kv_cache and all(0 < max(one.keys_error, one.values_error) < most for one in report.kv_cache)
    for one in report.kv_cache:
        assert one.tokens == 8 * 32
        assert one.keys_error <= 1.01 * one.keys_error_absmax and one.values_error <= 1.01 * one.values_error_absmax
    assert report.held_out is not None and report.held_out.kv_cache_dtype == kind
    written = json.loads((bundle / "report.json").read_text())
    assert written["kv_cache"]["format"] == kind and len(written["kv_cache"]["layers"]) == len(scales)
    assert "## KV cache" in (bundle / "report.md").read_text()

    exact, kept = (_logits(bundle, ReferenceBackend(), dtype) for dtype in ("float32", "auto"))
    assert 0 < np.abs(exact - kept).max() < (0.05 if kind == "int8" else 0.3) * np.abs(exact).max()
    np.testing.assert_array_equal(kept, _logits(bundle, ReferenceBackend(), kind))
    native = _logits(bundle, CpuBackend(), "auto")
    np.testing.assert_array_equal(native, _logits(bundle, CpuBackend(), kind))
    assert np.abs(native - kept).max() < 2e-2 * np.abs(kept).max()
    assert np.abs(_logits(bundle, CpuBackend(), "float32") - exact).max() < 1e-3 * np.abs(exact).max()


def test_values_are_measured_as_they_are_stored_once_factors_are_absorbed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Factors of the output projection divide the values: scales and errors are those of the divided ones."""
    bundle = tmp_path / "bundle"
    report = convert(_options(checkpoint, bundle, "smoothquant-int8"), Silent())
    folded = _scales(bundle)
    convert(_options(checkpoint, tmp_path / "plain", "rtn-int8"), Silent())
    plain = _scales(tmp_path / "plain")
    ratios = [np.array(folded[n].values) / np.array(plain[n].values) for n in plain]
    assert max(float(np.abs(ratio - 1).max()) for ratio in ratios) > 0.05, "nothing was folded; the test shows nothing"
    assert _value_errors(bundle, monkeypatch) == pytest.approx([one.values_error for one in report.kv_cache], rel=0.05)


def _value_errors(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the relative error of the values of each layer on tokens like those of calibration."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    keep = attention.keep_in_8_bits

    def recording(x: torch.Tensor, scales: Sequence[float], kind: KVFormat) -> torch.Tensor:
        seen.append((x, keep(x, scales, kind)))
        return seen[-1][1]

    monkeypatch.setattr(attention, "keep_in_8_bits", recording)
    executable = ReferenceBackend().compile(bundle, whole_sequence_options(32, "float32", "auto"))
    errors = []
    for tokens in np.random.default_rng(6).integers(0, 250, (6, 32)):
        seen.clear()
        whole_sequence_logits(executable, tokens)
        errors.append([((y - x).square().sum() / x.square().sum()).item() for x, y in seen[1::2]])
    return [float(error) for error in np.sqrt(np.mean(errors, axis=0))]


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.05), ("fp8", 0.15)])
def test_a_trained_model_stays_itself(
    kind: str, most: float, shared_data: Path, tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    samples = CalibrationOptions(samples=16, length=256, held_out=4)
    source = shared_data / "stories260k"
    report = convert(_options(source, tmp_path / "bundle", kv_cache=kind, calibration=samples, verify=True,
                              max_model_len=None), Silent())  # fmt: skip
    assert report.held_out is not None and report.fidelity is not None
    found = report.held_out.mean_kl
    print(f"{kind}: mean KL {found:.5f} nats per token")
    record_property("mean_kl", found)
    assert 0 < found < most and report.fidelity.mean_kl < most


def _artifacts(bundle: Path) -> dict[str, bytes]:
    return {name: (bundle / name).read_bytes() for name in _ARTIFACTS}


@pytest.mark.parametrize("scheme", ["none", "awq+gptq-int4-g16"])
def test_threads_and_interruptions_do_not_change_a_byte(scheme: str, checkpoint: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    convert(_options(checkpoint, tmp_path / "first", scheme, threads=1, work_dir=work), Silent())
    blocks = sorted(work.glob("block-*.safetensors"))
    assert len(blocks) == 2
    blocks[1].unlink()
    convert(_options(checkpoint, tmp_path / "second", scheme, threads=3, work_dir=work), Silent())
    convert(_options(checkpoint, tmp_path / "third", scheme, threads=2), Silent())
    assert _artifacts(tmp_path / "first") == _artifacts(tmp_path / "second") == _artifacts(tmp_path / "third")
    with pytest.raises(OptionError, match="different conversion: kv_cache differ"):
        convert(_options(checkpoint, tmp_path / "fourth", scheme, work_dir=work, kv_cache="fp8"), Silent())


def test_layers_that_share_a_cache_have_the_scales_of_what_writes_it(tmp_path: Path) -> None:
    source = _checkpoint("gemma3n_text", tmp_path / "model")
    bundle = tmp_path / "bundle"
    convert(_options(source, bundle), Silent())
    nodes = [node for node in Bundle.open(bundle).graph if node.op_type == "Attention"]
    readers = [node for node in nodes if not node.attributes.get_int("writes", 1)]
    assert readers, "no layer shares another one's cache; the test shows nothing"
    assert set(_scales(bundle)) == {node.attributes.get_int("layer") for node in nodes}
    assert all("key_scales" in node.attributes for node in readers)
    kept, native = (_logits(bundle, backend, "auto") for backend in (ReferenceBackend(), CpuBackend()))
    assert np.abs(native - kept).max() < 3e-2 * np.abs(kept).max()


def test_sinks_and_8_bits_go_together(tmp_path: Path) -> None:
    source = _checkpoint("gpt_oss", tmp_path / "model")
    convert(_options(source, tmp_path / "bundle"), Silent())
    kept, native = (_logits(tmp_path / "bundle", backend, "auto") for backend in (ReferenceBackend(), CpuBackend()))
    assert np.abs(native - kept).max() < 3e-2 * np.abs(kept).max()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_cache": "int4"}, "--kv-cache 'int4' is not one of none, int8, fp8"),
        ({"effort": "best"}, "--effort best is for methods that calibrate"),
        (
            {"kv_cache": "none"},
            "--calibration means nothing with --quantization none; leave it out, or give --kv-cache",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        _options(tmp_path, tmp_path / "bundle", **changes)


def test_calibration_comes_with_the_cache(tmp_path: Path) -> None:
    assert _options(tmp_path, tmp_path / "bundle", calibration=None).calibration_options == CalibrationOptions()


@pytest.mark.parametrize("backend", [ReferenceBackend(), CpuBackend()], ids=["reference", "cpu"])
def test_fp8_takes_scales_for_fp8(backend: object, checkpoint: Path, tmp_path: Path) -> None:
    convert(_options(checkpoint, tmp_path / "bundle"), Silent())
    with pytest.raises(OptionError, match="has scales for int8; convert the model with --kv-cache fp8, or use auto"):
        backend.compile(tmp_path / "bundle", BackendOptions(num_blocks=2, kv_cache_dtype="fp8"))  # type: ignore[attr-defined]

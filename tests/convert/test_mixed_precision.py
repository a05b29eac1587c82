"""Formats chosen under a budget: what is written keeps to it, is reported, resumed, and refused where impossible."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inferencex.convert.calibrate.data import CalibrationOptions
from inferencex.convert.calibrate.sensitivity import SensitivityMeasurement
from inferencex.convert.cli import app
from inferencex.convert.pipeline import ConvertOptions, Silent, convert
from inferencex.convert.quantize import parse_mixed_scheme, parse_scheme
from inferencex.convert.quantize.budget import Budget, parse_budget
from inferencex.formats.bundle import Bundle
from inferencex.formats.errors import InferenceXError, OptionError, QuantizationError
from tests.architectures.shrink import tiny_config
from tests.architectures.zoo import tiny_model

_ARTIFACTS = ("weights-00001-of-00001.safetensors", "model.onnx", "bundle.json")


def _checkpoint(folder: Path, name: str) -> Path:
    tiny_model(name).save_pretrained(folder)  # type: ignore[operator]
    tiny_config(name).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _checkpoint(tmp_path_factory.mktemp("model"), "llama")


def _options(checkpoint: Path, output: Path, budget: Budget, **changes: object) -> ConvertOptions:
    given: dict[str, Any] = {
        "scheme": parse_mixed_scheme("awq+gptq", group_size=16),
        "calibration": CalibrationOptions("random", samples=4, length=32, held_out=2),
        "verify": False,
        "max_model_len": 64,
        "budget": budget,
        **changes,
    }
    return ConvertOptions(str(checkpoint), output, **given)


def _bits(bundle: Path) -> float:
    with_head = Bundle.open(bundle)
    tensors = [with_head.quantized(name) for name in with_head.manifest.quantization]
    parameters = sum(int(tensor.integers().size) for tensor in tensors)
    return 8 * sum(tensor.nbytes for tensor in tensors) / parameters


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_bits_stay_within_the_target(name: str, tmp_path: Path) -> None:
    source = _checkpoint(tmp_path / "model", name)
    output = tmp_path / "bundle"
    report = convert(_options(source, output, Budget("bits", 5.7), verify=True), Silent())
    assert 5.4 < _bits(output) <= 5.7
    assert report.mixed is not None and report.held_out is not None
    assert report.mixed["bits"] == pytest.approx(_bits(output))
    assert len(report.mixed["formats"]) > 1
    assert report.mixed["measured_kl"] == report.held_out.mean_kl
    written = json.loads((output / "report.json").read_text())
    assert written["scheme"] == "awq+gptq-mixed-g16"
    assert written["mixed"]["budget"]["option"] == "--target-bits 5.7"
    text = (output / "report.md").read_text()
    assert "## Mixed precision" in text
    assert report.mixed["weights"][0]["name"] in text
    assert json.loads((output / "bundle.json").read_text())["scheme"]["name"] == "awq+gptq-mixed-g16"


def test_more_bits_are_expected_to_be_closer_to_the_source(checkpoint: Path, tmp_path: Path) -> None:
    expected = []
    for bits in (4.8, 5.7, 7.0):
        report = convert(_options(checkpoint, tmp_path / f"{bits}", Budget("bits", bits)), Silent())
        assert report.mixed is not None
        expected.append(report.mixed["predicted_kl"])
    assert expected == sorted(expected, reverse=True)


def test_the_whole_bundle_stays_within_a_size(checkpoint: Path, tmp_path: Path) -> None:
    limit = 300_000
    convert(_options(checkpoint, tmp_path / "bundle", Budget("size", limit)), Silent())
    assert sum(file.stat().st_size for file in (tmp_path / "bundle").rglob("*")) <= limit


def test_the_divergence_stays_within_a_limit(checkpoint: Path, tmp_path: Path) -> None:
    loose = convert(_options(checkpoint, tmp_path / "loose", Budget("kl", 2e-2), verify=True), Silent())
    tight = convert(_options(checkpoint, tmp_path / "tight", Budget("kl", 2e-3), verify=True), Silent())
    assert loose.held_out is not None and tight.held_out is not None
    assert loose.held_out.mean_kl <= 2e-2
    assert tight.held_out.mean_kl <= 2e-3
    assert loose.mixed is not None and tight.mixed is not None
    assert loose.mixed["bits"] < tight.mixed["bits"]
    assert 1 <= len(tight.mixed["attempts"]) <= 3
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_divergence_that_no_format_reaches_is_refused_with_what_is(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(QuantizationError, match=r"--max-kl 1e-12 cannot be reached: .* \(9\.\d+ bits .* mean KL"):
        convert(_options(checkpoint, tmp_path / "bundle", Budget("kl", 1e-12), verify=True), Silent())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (Budget("bits", 3.0), r"from 4\.\d+ to 9\.\d+ bits are possible with int3, int4, int5, int6, int8"),
        (Budget("size", 20_000), r"bundles of about 0\.\d to 0\.\d MB are possible .* --embedding"),
    ],
)
def test_impossible_budgets_are_refused_before_any_work(
    budget: Budget, message: str, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=message):
        convert(_options(checkpoint, tmp_path / "bundle", budget), Silent())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("budget", "remark"),
    [
        (Budget("bits", 16.0), r"--target-bits 16 is no limit: the most that formats take is 9\.\d+ bits a weight"),
        (Budget("size", 10**9), r"is no limit: the most that formats take is about 0\.\d MB"),
    ],
)
def test_budgets_that_limit_nothing_are_said_to(budget: Budget, remark: str, checkpoint: Path, tmp_path: Path) -> None:
    report = convert(_options(checkpoint, tmp_path / "bundle", budget), Silent())
    assert any(re.search(remark, note) for note in report.notes)


def test_a_later_run_does_not_measure_again(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = _options(checkpoint, tmp_path / "first", Budget("bits", 5.0), work_dir=tmp_path / "work")
    convert(options, Silent())
    (tmp_path / "work" / "attempt-1" / "block-00001.safetensors").unlink()

    def fail(self: object, progress: object) -> None:
        raise AssertionError("measured twice")

    monkeypatch.setattr(SensitivityMeasurement, "run", fail)
    convert(replace(options, output=tmp_path / "second", threads=1), Silent())
    for name in _ARTIFACTS:
        assert (tmp_path / "second" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()
    with pytest.raises(OptionError, match=r"holds blocks of a different conversion: budget"):
        convert(replace(options, output=tmp_path / "third", budget=Budget("bits", 5.5)), Silent())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"target_bits": 4.5, "max_kl": 0.1}, "--target-bits and --max-kl are different budgets"),
        ({"target_bits": -1.0}, "--target-bits -1.0: expected a number above 0"),
        ({"max_kl": float("nan")}, "--max-kl nan: expected a number above 0"),
        ({"target_size": "a lot"}, "--target-size 'a lot': expected a size such as 80MB"),
        ({"target_size": "0MB"}, "expected a size"),
    ],
)
def test_budgets_that_mean_nothing_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_budget(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "nbytes"), [("80MB", 80_000_000), ("1.5 GiB", 3 << 29), ("1200", 1200), ("2k", 2000), ("3KiB", 3072)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_budget(target_size=text) == Budget("size", nbytes)


def test_names_of_mixtures() -> None:
    assert parse_mixed_scheme("none").name == "awq+gptq-mixed-g64"
    assert parse_mixed_scheme("rtn-mixed-g32") == parse_mixed_scheme("rtn", group_size=32)
    scheme = parse_mixed_scheme("gptq", symmetric=True)
    assert [one.type for one in scheme.candidates] == ["int3", "int4", "int5", "int6", "int8"]
    assert all(one.symmetric and one.group_size == 64 for one in scheme.candidates)
    for name in ("awq+gptq-int4", "int4", "smoothquant", "gptq-mixed-g0x"):
        with pytest.raises(OptionError, match="with a budget: expected a method, one of"):
            parse_mixed_scheme(name)
    with pytest.raises(OptionError, match="--group-size says 64"):
        parse_mixed_scheme("rtn-mixed-g32", group_size=64)


def test_a_budget_and_a_type_exclude_each_other(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="chooses the types of weights"):
        _options(checkpoint, tmp_path / "bundle", Budget("bits", 5.0), scheme=parse_scheme("gptq-int4"))
    with pytest.raises(OptionError, match="give --target-bits"):
        replace(_options(checkpoint, tmp_path / "bundle", Budget("bits", 5.0)), budget=None)
    with pytest.raises(OptionError, match="takes a measurement; leave --no-verify out"):
        _options(checkpoint, tmp_path / "bundle", Budget("kl", 0.1))


def test_the_command_refuses_two_budgets_and_makes_a_mixture(checkpoint: Path, tmp_path: Path) -> None:
    common = ["--model-id", str(checkpoint), "-o", str(tmp_path / "bundle"), "--max-model-len", "64"]
    sampled = ["--calibration", "random", "--calibration-samples", "4", "--calibration-length", "32"]
    refused = CliRunner().invoke(app, [*common, "--target-bits", "5", "--target-size", "1MB"])
    assert isinstance(refused.exception, InferenceXError)
    static = CliRunner().invoke(app, [*common, "--target-bits", "5", "--static-activations"])
    assert isinstance(static.exception, OptionError)
    made = CliRunner().invoke(app, [*common, *sampled, "--target-bits", "5", "--quantization", "rtn", "--no-verify"])
    assert made.exit_code == 0, made.output
    assert json.loads((tmp_path / "bundle" / "report.json").read_text())["scheme"] == "rtn-mixed-g64"

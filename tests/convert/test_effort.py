"""`--effort`: best learns what it can and never ends worse than it began; its bytes do not depend on interruptions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from inferencex.convert import calibration_stage, refinement_stage
from inferencex.convert.calibrate.data import CalibrationOptions
from inferencex.convert.pipeline import ConvertOptions, Silent, convert
from inferencex.convert.quantize import WeightInfo, parse_scheme, plan_quantization
from inferencex.convert.quantize.refine import Rates
from inferencex.formats.bundle import Bundle
from inferencex.formats.errors import OptionError
from tests.architectures.shrink import tiny_config
from tests.architectures.zoo import tiny_model

_WEIGHTS = "weights-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)  # type: ignore[operator]
    tiny_config("llama").save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learn for a few steps only."""
    monkeypatch.setattr(calibration_stage, "BLOCK_REFINEMENT", replace(calibration_stage.BLOCK_REFINEMENT, steps=6))
    monkeypatch.setattr(refinement_stage, "REFINEMENT", replace(refinement_stage.REFINEMENT, steps=8, check_every=2))


def _options(checkpoint: Path, output: Path, **changes: object) -> ConvertOptions:
    options = ConvertOptions(
        str(checkpoint),
        output,
        parse_scheme("int4", group_size=16),
        calibration=CalibrationOptions("random", samples=16, length=32, held_out=4),
        verify=False,
        max_model_len=64,
        effort="best",
    )
    return replace(options, **changes)  # type: ignore[arg-type]


def test_best_keeps_the_format_and_never_ends_worse(checkpoint: Path, tmp_path: Path) -> None:
    report = convert(_options(checkpoint, tmp_path / "best"), Silent())
    convert(_options(checkpoint, tmp_path / "normal", effort="normal"), Silent())
    assert report.refinement is not None
    assert report.refinement["after"] <= report.refinement["before"]
    best, normal = Bundle.open(tmp_path / "best"), Bundle.open(tmp_path / "normal")
    names = [layer.name for layer in report.layers]
    assert names
    for name in names:
        one, other = best.quantized(name), normal.quantized(name)
        assert (one.bits, one.group_size, one.symmetric, one.shape) == (
            other.bits, other.group_size, other.symmetric, other.shape,
        )  # fmt: skip
        assert one.nbytes == other.nbytes


def test_rates_that_ruin_the_model_leave_it_as_it_began(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wild = Rates(rounding=5.0, scales=2.0, zeros=5.0, plain=5.0)
    monkeypatch.setattr(refinement_stage, "REFINEMENT", replace(refinement_stage.REFINEMENT, rates=wild))
    report = convert(_options(checkpoint, tmp_path / "bundle"), Silent())
    assert report.refinement is not None
    assert report.refinement["after"] == report.refinement["before"]
    assert report.refinement["best_step"] == 0


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_and_interruptions_do_not_change_a_byte(threads: int, checkpoint: Path, tmp_path: Path) -> None:
    convert(_options(checkpoint, tmp_path / "whole", threads=2), Silent())
    work = tmp_path / "work"
    first = _options(checkpoint, tmp_path / "first", threads=threads, work_dir=work)
    convert(first, Silent())
    (work / "block-00001.safetensors").unlink()
    (work / "refined.safetensors").unlink()
    convert(replace(first, output=tmp_path / "second"), Silent())
    expected = (tmp_path / "whole" / _WEIGHTS).read_bytes()
    assert (tmp_path / "first" / _WEIGHTS).read_bytes() == expected
    assert (tmp_path / "second" / _WEIGHTS).read_bytes() == expected


def test_an_interrupted_refinement_goes_on(checkpoint: Path, tmp_path: Path) -> None:
    convert(_options(checkpoint, tmp_path / "whole"), Silent())

    class Interrupting(Silent):
        def advance(self, done: int, total: int, what: str) -> None:
            if "held-out KL" in what and done >= 4:
                raise KeyboardInterrupt

    work = tmp_path / "work"
    with pytest.raises(KeyboardInterrupt, match="the same command goes on from there"):
        convert(_options(checkpoint, tmp_path / "second", work_dir=work), Interrupting())
    assert not (tmp_path / "second").exists()
    assert not (work / "refined.safetensors").exists()
    convert(_options(checkpoint, tmp_path / "second", work_dir=work), Silent())
    assert (tmp_path / "second" / _WEIGHTS).read_bytes() == (tmp_path / "whole" / _WEIGHTS).read_bytes()
    report = json.loads((tmp_path / "second" / "report.json").read_text())
    assert report["refinement"]["steps"] == 8


def test_a_fast_conversion_is_another_one(checkpoint: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    convert(_options(checkpoint, tmp_path / "first", effort="fast", work_dir=work), Silent())
    with pytest.raises(OptionError, match="effort"):
        convert(_options(checkpoint, tmp_path / "second", effort="normal", work_dir=work), Silent())


@pytest.mark.parametrize("effort", ["fast", "best"])
def test_effort_without_calibration_is_refused(effort: str, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="does not"):
        _options(checkpoint, tmp_path / "bundle", scheme=parse_scheme("rtn-int4"), calibration=None, effort=effort)


def test_an_unknown_effort_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="fast, normal, best"):
        _options(checkpoint, tmp_path / "bundle", effort="heroic")


def test_a_model_too_large_to_be_learned_at_once_is_refused() -> None:
    plans = plan_quantization([WeightInfo("w", (4096, 4096))], parse_scheme("int4"))
    refinement_stage.check_memory(plans, 1 << 40)
    with pytest.raises(OptionError, match=r"takes about 0\.3 GiB for its 16,777,216 quantized weights, .* 0\.1 GiB"):
        refinement_stage.check_memory(plans, 1 << 27)

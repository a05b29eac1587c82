"""Calibrated methods work on every kind of architecture: what they fold and quantize still computes the model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from inferencex.convert.calibrate.data import CalibrationOptions
from inferencex.convert.pipeline import ConvertOptions, Silent, convert
from inferencex.convert.quantize import parse_scheme
from inferencex.formats.bundle import Bundle
from tests.architectures.families import FAMILIES, Family
from tests.architectures.shrink import tiny_config
from tests.architectures.zoo import tiny_model

_KINDS = (
    "gqa", "mla-interleaved-moe", "qkv-bias", "attention-and-mlp-bias", "norm-without-weight", "norm-weight-plus-one",
    "post-norms-only", "rope-interleaved", "rope-partial-packed-qkv", "mqa-packed-learned-positions",
)  # fmt: skip
_MIXTURES = [family for family in FAMILIES if "moe" in family.id or "expert" in family.id]
_SELECTED = [family for family in FAMILIES if family.id in _KINDS and family not in _MIXTURES] + _MIXTURES


def _converted(family: Family, scheme: str, folder: Path) -> Path:
    checkpoint, bundle = folder / "checkpoint", folder / "bundle"
    if not checkpoint.exists():
        model, config = tiny_model(family.name, **family.overrides), tiny_config(family.name, **family.overrides)
        model.save_pretrained(checkpoint)  # type: ignore[operator]
        if type(config) is not type(model.config):
            config.save_pretrained(checkpoint)
    options = ConvertOptions(
        str(checkpoint),
        bundle,
        parse_scheme(scheme),
        max_model_len=64,
        verify_limit=0.05,
        verify_tokens=48,
        overwrite=True,
        calibration=CalibrationOptions("random", samples=8, length=32, held_out=1),
    )
    convert(options, Silent())
    return bundle


@pytest.mark.parametrize("scheme", ["awq+gptq-int8-g16", "smoothquant-int8"])
@pytest.mark.parametrize("family", _SELECTED, ids=lambda family: family.id)
def test_a_calibrated_bundle_is_still_the_model(family: Family, scheme: str, tmp_path: Path) -> None:
    bundle = _converted(family, scheme, tmp_path)
    report = json.loads((bundle / "report.json").read_text())
    assert report["fidelity"]["mean_kl"] < 0.05
    assert report["layers"]
    for layer in report["layers"]:
        assert layer["output_error"] is None or math.isfinite(layer["output_error"])


@pytest.mark.parametrize("family", _MIXTURES, ids=lambda family: family.id)
def test_experts_that_no_token_reaches_are_rounded_and_listed(family: Family, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    model, config = tiny_model(family.name, **family.overrides), tiny_config(family.name, **family.overrides)
    model.save_pretrained(checkpoint)  # type: ignore[operator]
    if type(config) is not type(model.config):
        config.save_pretrained(checkpoint)
    options = ConvertOptions(
        str(checkpoint),
        tmp_path / "bundle",
        parse_scheme("gptq-int4-g16"),
        max_model_len=64,
        verify=False,
        calibration=CalibrationOptions("random", samples=1, length=32, held_out=1),
    )
    report = convert(options, Silent())
    bundle = Bundle.open(tmp_path / "bundle")
    for layer in report.layers:
        assert np.isfinite(bundle.quantized(layer.name).float_scales()).all()
    experts = [layer for layer in report.layers if len(layer.shape) == 3]
    assert experts
    for layer in experts:
        assert (layer.tokens == 0) == ("no token reached them" in layer.remark)

"""The report of a conversion, for programs and for people."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from inferencex.convert.fidelity import Fidelity
from inferencex.convert.held_out import HeldOutFidelity
from inferencex.convert.layer_report import LayerReport
from inferencex.convert.pack import PackedWeight
from inferencex.convert.report import Report
from inferencex.formats.bundle import BundleWriter
from tests.formats.bundle.small import fill

LAYER = LayerReport("model.layers.0.mlp.down_proj.weight", (8, 8), "gptq", "int4-g64", 4.31, 0.09, 0.08, 0.05, 640)


def _report() -> Report:
    return Report(
        model="some/model",
        scheme="gptq-int4",
        seconds={"open": 0.5, "calibrate": 61.25},
        peak_memory=3 << 30,
        source_bytes=1 << 20,
        bundle_bytes=1 << 19,
        weights=[PackedWeight(LAYER.name, (8, 8), "linear", "int4-g64", 0.09, 64)],
        notes=["a note"],
        fidelity=Fidelity(64, 0.1, 0.9, 0.8, 1.5, 20.0, 22.0),
        layers=[LAYER],
        calibration={
            "name": "text.txt", "kind": "local", "files": [{"name": "text.txt", "size": 3}], "seed": 7, "samples": 128,
            "length": 512, "held_out": 16, "sha256": "ab" * 32,
        },
        held_out=HeldOutFidelity(16, 512, 0.118, 0.87, 0.81, 29.4, 32.6, "cpu", "float32"),
    )  # fmt: skip


def test_programs_find_every_figure() -> None:
    report = _report()
    found = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert found["layers"] == [{**asdict(LAYER), "shape": [8, 8]}]
    assert found["bits_per_weight"] == 4.31
    assert found["calibration"]["sha256"] == "ab" * 32
    assert found["held_out"]["p99_kl"] == 0.87
    assert found["seconds"] == {"open": 0.5, "calibrate": 61.25}
    assert found["peak_memory_bytes"] == 3 << 30


def test_people_find_every_figure() -> None:
    text = _report().to_markdown()
    for part in (
        "- time: 61.8 s (open 0.5 s, calibrate 61.2 s)",
        "- peak memory: 3.0 GiB",
        "Over 16 windows of 512 tokens",
        "| 0.118 | 0.87 | 81.0% | 29.40 | 32.60 |",
        "- text: `text.txt` (local)",
        "- samples: 128 of 512 tokens, seed 7",
        "![relative output error by block](report.svg)",
        "1 weights, 4.310 bits per weight",
        "- a note",
    ):
        assert part in text, part


def test_a_conversion_without_calibration_says_nothing_of_it() -> None:
    report = _report()
    report.layers, report.calibration, report.held_out = [], None, None
    text = report.to_markdown()
    assert "report.svg" not in text
    assert "Calibration" not in text
    assert report.to_plot() is None
    assert report.to_json()["bits_per_weight"] is None


def test_the_plot_lies_beside_the_page_that_shows_it(tmp_path: Path) -> None:
    report = _report()
    with BundleWriter(tmp_path / "out") as writer:
        fill(writer)
        writer.add_report(report.to_json(), report.to_markdown(), report.to_plot())
        writer.commit()
    assert (tmp_path / "out" / "report.svg").read_text(encoding="utf-8") == report.to_plot()
    assert "(report.svg)" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    with BundleWriter(tmp_path / "out", overwrite=True) as writer:  # a report is no foreign file
        fill(writer)
        writer.commit()
    assert not (tmp_path / "out" / "report.svg").exists()

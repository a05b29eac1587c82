"""`inferencex doctor` says what is here, what runs, and why something does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inferencex.cli.doctor import app
from inferencex.runtime.backends.diagnosis import diagnose


def test_tables_name_backends_and_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, [], env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    for text in ("Machine", "kernels of the CPU", "Drivers of GPUs", "NVIDIA", "AMD", "Packages", "numpy", "triton"):
        assert text in result.output


def test_json_has_every_section() -> None:
    result = CliRunner().invoke(app, ["--json"])
    found = json.loads(result.output)
    assert {"machine", "drivers", "devices", "packages", "backends", "chosen"} == set(found)
    by_name = {finding["what"]: finding for finding in found["backends"]}
    assert by_name["cpu"] == {"what": "cpu", "state": "yes", "is_good": True}


def test_a_folder_that_is_no_bundle(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [str(tmp_path / "missing")])
    assert result.exit_code == 1
    assert "is not a folder" in str(result.exception)


def test_drivers_are_read_from_the_kernel(tmp_path: Path) -> None:
    nvidia = tmp_path / "proc/driver/nvidia/version"
    nvidia.parent.mkdir(parents=True)
    nvidia.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n")
    amd = tmp_path / "sys/module/amdgpu/version"
    amd.parent.mkdir(parents=True)
    amd.write_text("6.12.12\n")
    drivers = {finding.what: finding.state for finding in diagnose(root=tmp_path).drivers}
    assert "580.65.06" in drivers["NVIDIA"]
    assert "no /dev/kfd" in drivers["AMD"]
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    assert {f.what: f.state for f in diagnose(root=tmp_path).drivers}["AMD"] == "amdgpu 6.12.12, with /dev/kfd"

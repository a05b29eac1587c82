"""`inferencex doctor` says what is here, what runs, and why something does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inferencex.cli.doctor import app
from inferencex.runtime.backends.diagnosis import Diagnosis, Finding, diagnose


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


def test_a_folder_that_holds_no_bundle_runs_nowhere(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--json", str(tmp_path)])
    found = json.loads(result.output)
    assert found["chosen"] is None
    assert all(
        "the bundle cannot be read" in f["state"] for f in found["backends"] if f["what"] in ("cpu", "reference")
    )
    result = CliRunner().invoke(app, [str(tmp_path)], env={"COLUMNS": "300"})
    assert "runs on no backend here" in result.output


@pytest.mark.parametrize(("has_gpu", "chosen"), [(True, "triton"), (False, "cpu")])
def test_what_auto_does_not_try_is_not_chosen(
    has_gpu: bool, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's interpreter runs bundles without a GPU, and only where it is asked for."""
    found = Diagnosis(backends=[Finding("triton", "yes", True), Finding("cpu", "yes", True)])
    monkeypatch.setattr("inferencex.runtime.backends.diagnosis.diagnose", lambda bundle: found)
    monkeypatch.setattr("inferencex.runtime.backends.may_have_gpu", lambda: has_gpu)
    assert json.loads(CliRunner().invoke(app, ["--json", str(tmp_path)]).output)["chosen"] == chosen


_BREAK = """
import sys
from importlib.machinery import ModuleSpec

class Broken:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name == {broken!r} else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        raise {error}

sys.meta_path.insert(0, Broken())
from inferencex.cli.doctor import app
app(["--json"], standalone_mode=False)
"""


@pytest.mark.parametrize(
    ("broken", "error", "about"),
    [
        ("torch", OSError("libcudart.so.12: cannot open shared object file"), "libcudart.so.12"),
        ("inferencex.runtime.backends.cpu.native._cpu", ImportError("GLIBCXX_3.4.99 not found"), "GLIBCXX_3.4.99"),
    ],
)
def test_what_cannot_be_loaded_is_a_finding(broken: str, error: Exception, about: str) -> None:
    """In a process of its own, for nothing of it may be loaded yet. The rest is told all the same."""
    command = _BREAK.format(broken=broken, error=f"{type(error).__name__}({str(error)!r})")
    result = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    told = [f for section in ("machine", "devices", "backends") for f in found[section] if about in f["state"]]
    assert len(told) >= 2
    assert all(finding["is_good"] is False for finding in told)
    assert found["packages"]

from __future__ import annotations

from pathlib import Path

import pytest

from inferencex.cli.console import exit_status
from inferencex.cli.export import app
from inferencex.formats.bundle import BundleWriter
from tests.formats.bundle.small import fill


def test_refusals_are_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with BundleWriter(tmp_path / "bundle") as writer:
        fill(writer)
        writer.commit()
    arguments = [str(tmp_path / "bundle"), "--format", "awq", "--output", str(tmp_path / "out")]
    assert exit_status(app, "inferencex export", arguments) == 1
    captured = capfd.readouterr()
    assert captured.out == "" and "convert it again" in captured.err and "Traceback" not in captured.err
    assert not (tmp_path / "out").exists()


def test_format_is_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    assert exit_status(app, "inferencex export", ["bundle", "--output", "out"]) == 2
    assert "--format" in capfd.readouterr().err
    assert exit_status(app, "inferencex export", ["--help"]) == 0
    assert "compressed-tensors" in capfd.readouterr().out

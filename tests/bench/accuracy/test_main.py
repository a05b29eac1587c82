"""The command line: what it refuses, and that a finished row is not run again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from bench.accuracy.__main__ import _alone, _interpreters, _key, _measure_all, accuracy
from bench.accuracy.reference import Reference
from bench.accuracy.results import Run
from bench.accuracy.run import Harness, ProcessError
from bench.accuracy.tools.base import Row, Task
from tests.bench.accuracy.test_results import finding, run

app = typer.Typer()
app.command()(accuracy)


class Scripted(Harness):
    """Measures nothing; `asked` has the rows that were asked for, and `failing` those that fail."""

    def __init__(self, failing: Sequence[str] = ()) -> None:
        task = Task(Path(), Path(), (), 1, 1, 1, 1)
        super().__init__(task, Reference(np.zeros((1, 1), np.int64), torch.zeros(1), torch.zeros(1)), Path())
        object.__setattr__(self, "asked", [])
        object.__setattr__(self, "failing", failing)

    asked: list[tuple[str, bool]]
    failing: Sequence[str]

    def version(self, tool: str) -> str:
        if tool == "gptqmodel":
            raise ProcessError("No module named 'gptqmodel'")
        return "1.0"

    def measure(self, tool: str, row: Row, version: str, *, again: bool) -> object:  # type: ignore[override]
        self.asked.append((row.name, again))
        if row.name in self.failing:
            raise ProcessError("it ran out of memory")
        return finding(tool, row.name)


def measured(harness: Harness, before: Run, results: Path, rows: dict[str, list[str]], *, again: bool = False) -> None:
    _measure_all(harness, rows, before, results, Console(quiet=True), again=again)


def test_a_finished_row_is_not_run_again(tmp_path: Path) -> None:
    results, rows = tmp_path / "results.json", {"llm-compressor": ["gptq", "awq"]}
    first = Scripted(failing=["awq"])
    measured(first, run(), results, rows)
    kept = Run.load(results)
    assert [name for name, _ in first.asked] == ["gptq", "awq"]
    assert list(kept.findings) == ["llm-compressor/gptq"]
    assert kept.failures == {"llm-compressor/awq": "it ran out of memory"}
    second = Scripted()
    measured(second, kept, results, rows)
    assert second.asked == [("awq", False)]
    assert not Run.load(results).failures


def test_again_converts_once_what_rows_share(tmp_path: Path) -> None:
    harness, before = Scripted(), run(finding("llm-compressor", "w8a8"))
    measured(harness, before, tmp_path / "results.json", {"llm-compressor": ["w8a8-weights", "w8a8"]}, again=True)
    assert harness.asked == [("w8a8-weights", True), ("w8a8", False)]


def test_a_tool_that_is_not_there_is_skipped_with_the_reason(tmp_path: Path) -> None:
    harness, before = Scripted(), run()
    measured(harness, before, tmp_path / "results.json", {"gptqmodel": ["gptq"], "nncf": ["awq"]})
    assert before.skipped == {"gptqmodel": "No module named 'gptqmodel'"}
    assert list(before.findings) == ["nncf/awq"]


def test_interpreters_come_from_environments_and_options(tmp_path: Path) -> None:
    for name in ("autoround", "gptqmodel"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").touch()
    assert _interpreters(["gptqmodel=/elsewhere/python"], tmp_path) == {
        "autoround": str(tmp_path / "autoround" / "bin" / "python"),
        "gptqmodel": "/elsewhere/python",
    }
    with pytest.raises(typer.BadParameter, match="expected TOOL=PATH"):
        _interpreters(["auto-round=/elsewhere/python"], None)


def test_another_calibration_is_another_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    ids, judged = np.zeros((4, 32), np.int64), np.zeros((2, 64), np.int64)
    name = _key(ids, judged, 2, tmp_path)
    assert name.startswith("4x32-2x64-2-threads-")
    assert len({name, _key(ids + 1, judged, 2, tmp_path), _key(ids, judged + 1, 2, tmp_path)}) == 3
    assert _key(ids, judged, 2, tmp_path) == name


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    with _alone(tmp_path), pytest.raises(typer.BadParameter, match="another run is at work there"):
        _alone(tmp_path)
    with _alone(tmp_path):
        pass


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "auto-round"], "is not one of"),
        (["--calibration", "/nowhere/text.txt"], "there is no such file"),
        (["--samples", "0"], "--samples"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(tmp_path: Path, arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, [*arguments, "--folder", str(tmp_path)], env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert said in result.output


def test_rows_are_listed() -> None:
    result = CliRunner().invoke(app, ["--list"])
    assert result.exit_code == 0
    assert "autoround/iterations-50" in result.output.splitlines()

"""What does not pass its gate is neither exported nor published, and says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest

from inferencex.cli.console import exit_status
from inferencex.recipes.pipeline import run as run_module
from inferencex.recipes.pipeline.cli import app
from inferencex.recipes.pipeline.schedule import StepResult
from tests.recipes.pipeline.conftest import COMMANDS

Run = Callable[..., dict[str, StepResult]]
MATRIX = ("conversions.int4.options={}", "conversions.int4.matrix={quantization: [rtn-int3, rtn-int4]}",
          "gates.quality.baseline=null", "publish.0.to=memory://gates/{name}")  # fmt: skip


def test_gate_stops_what_depends_on_it_and_nothing_else(run_recipe: Run, tmp_path: Path) -> None:
    results = run_recipe(*MATRIX)
    states = {name.rpartition(":")[0] if name.startswith("publish") else name: r.state for name, r in results.items()}
    assert states == {
        "convert:int4-rtn-int3": "done",
        "convert:int4-rtn-int4": "done",
        "evaluate:int4-rtn-int3:quality": "failed gate",
        "evaluate:int4-rtn-int4:quality": "done",
        "export:int4-rtn-int3:gguf": "skipped",
        "export:int4-rtn-int4:gguf": "done",
        "publish:int4-rtn-int3:bundle": "skipped",
        "publish:int4-rtn-int4:bundle": "done",
    }
    summary = (tmp_path / "work/report/summary.md").read_text(encoding="utf-8")
    assert "did not pass: evaluate:int4-rtn-int3:quality" in summary
    assert "max_kl: 0.5, but must be at most 0.02" in summary
    document = json.loads((tmp_path / "work/report/summary.json").read_text(encoding="utf-8"))
    assert document["passed"] is False and len(document["steps"]) == 8


def test_junit_has_steps_and_the_evaluations_suites(run_recipe: Run, tmp_path: Path) -> None:
    run_recipe(*MATRIX)
    root = ElementTree.parse(tmp_path / "work/report/junit.xml").getroot()
    steps, *suites = root.findall("testsuite")
    assert (steps.get("tests"), steps.get("failures"), steps.get("errors"), steps.get("skipped")) == (
        "8",
        "1",
        "0",
        "2",
    )
    failure = steps.find("testcase/failure")
    assert failure is not None and "0.5" in (failure.get("message") or "")
    assert {suite.get("name") for suite in suites} == {
        "int4-rtn-int3:quality: stand-in",
        "int4-rtn-int4:quality: stand-in",
    }


def test_a_failed_gate_is_not_measured_again(run_recipe: Run, counts: Callable[[], list[str]]) -> None:
    settings = ("conversions.int4.options.quantization=rtn-int3",)
    assert run_recipe(*settings)["evaluate:int4:quality"].state == "failed gate"
    assert run_recipe(*settings)["evaluate:int4:quality"].state == "failed gate"
    assert counts() == ["convert", "eval"]


def test_a_gate_is_measured_again_when_what_it_reads_changes(
    tmp_path: Path, run_recipe: Run, counts: Callable[[], list[str]]
) -> None:
    """Of two files of one name both count, and of a baseline that is a folder what is in it."""
    for folder in ("arc", "piqa", "baseline"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "test.jsonl").write_text("{}", encoding="utf-8")
    (tmp_path / "baseline" / "bundle.json").write_text("{}", encoding="utf-8")
    (tmp_path / "gate.yaml").write_text(
        "tasks:\n  arc_easy: {path: arc/test.jsonl}\n  piqa: {path: piqa/test.jsonl}\n", encoding="utf-8"
    )
    settings = ("gates.quality.recipe=gate.yaml", f"gates.quality.baseline={tmp_path / 'baseline'}")
    run_recipe(*settings)
    for changed in ("arc/test.jsonl", "piqa/test.jsonl", "baseline/bundle.json"):
        (tmp_path / changed).write_text('{"other": 1}', encoding="utf-8")
        assert run_recipe(*settings)["evaluate:int4:quality"].state == "done", changed
        assert run_recipe(*settings)["evaluate:int4:quality"].state == "cached", changed
    assert counts().count("eval") == 4 and counts().count("convert") == 1


def test_exit_status_and_summary(
    recipe: Path, tmp_path: Path, counts: object, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_module, "PipelineOptions", partial(run_module.PipelineOptions, commands=COMMANDS))
    arguments = [str(recipe), f"--work-dir={tmp_path / 'work'}"]
    assert exit_status(app, "inferencex pipeline", arguments) == 0
    bad = [*arguments, "--set", "conversions.int4.options.quantization=rtn-int3"]
    capfd.readouterr()
    assert exit_status(app, "inferencex pipeline", bad) == 1
    captured = capfd.readouterr()
    assert "failed gate" in captured.out and "0.5, but must be" in captured.out and "did not pass" in captured.err
    assert exit_status(app, "inferencex pipeline", [*bad, "--log-format", "json"]) == 1
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert {line["event"] for line in lines} == {"pipeline", "ended", "finished"} and lines[-1]["passed"] is False


def test_a_command_that_fails_says_why(run_recipe: Run) -> None:
    results = run_recipe("conversions.int4.options.quantization=int8-dynamic")
    failed = results["convert:int4"]
    assert failed.state == "failed" and "this one cannot be converted (exit status 1; all of it:" in failed.message
    assert {result.state for name, result in results.items() if name != "convert:int4"} == {"skipped"}

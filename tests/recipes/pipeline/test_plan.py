"""A dry run tells what would be done, and does nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from inferencex.cli.console import exit_status
from inferencex.recipes.pipeline.cli import app
from inferencex.recipes.pipeline.estimates import GIB, conversion_estimate
from inferencex.recipes.pipeline.hub import transport_error
from inferencex.recipes.pipeline.run import PipelineOptions, plan
from inferencex.recipes.pipeline.schedule import StepResult


def test_dry_run_writes_nothing(recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = sorted(tmp_path.rglob("*"))
    arguments = [str(recipe), "--dry-run", f"--work-dir={tmp_path / 'work'}"]
    assert exit_status(app, "inferencex pipeline", arguments) == 0
    shown = capfd.readouterr().out
    assert "convert:int4" in shown and "4 steps" in shown and "GiB" in shown
    assert exit_status(app, "inferencex pipeline", [*arguments, "--log-format", "json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert [step["step"] for step in document["steps"]][:2] == ["convert:int4", "evaluate:int4:quality"]
    assert document["seconds"] > 0 and document["memory"] >= GIB and document["disk"] > 0
    assert sorted(tmp_path.rglob("*")) == before


def test_what_was_measured_replaces_the_rule(
    recipe: Path, tmp_path: Path, run_recipe: Callable[..., dict[str, StepResult]]
) -> None:
    options = PipelineOptions(recipe, work_dir=tmp_path / "work")
    assert not any(step.estimate.measured for step in plan(options).steps)
    results = run_recipe()
    record = results["convert:int4"].record
    assert record is not None and record.peak_memory > 1 << 20
    assert all(step.finished for step in plan(options).steps) and plan(options).seconds == 0
    changed = PipelineOptions(recipe, ("conversions.int4.options.quantization=none",), tmp_path / "work")
    assert not any(step.finished for step in plan(changed).steps)
    planned = {step.id: step.estimate for step in plan(changed).steps}
    assert planned["convert:int4"].measured
    assert planned["convert:int4"].memory == record.peak_memory and planned["convert:int4"].disk == record.disk


def test_time_of_steps_at_once(recipe: Path, tmp_path: Path) -> None:
    settings = ("conversions.int4.matrix={quantization: [none, int8-dynamic]}", "conversions.int4.options={}",
                "gates=[]", "exports=[]", "publish=[]")  # fmt: skip
    one, two = (plan(PipelineOptions(recipe, settings, tmp_path / "work", jobs=jobs)).seconds for jobs in (1, 2))
    assert one is not None and two is not None and two < one <= 2 * two


def test_estimates_grow_with_what_is_asked() -> None:
    schemes = ({"quantization": "rtn-int4"}, {"quantization": "int4"}, {"quantization": "int4", "effort": "best"})
    found = [conversion_estimate(GIB, scheme, 2) for scheme in schemes]
    seconds, memory = [e.seconds or 0 for e in found], [e.memory or 0 for e in found]
    assert seconds == sorted(set(seconds)) and memory == sorted(set(memory))
    assert (found[0].disk or 0) < GIB / 3
    assert conversion_estimate(None, {}, 2).seconds is None


def test_unknown_source_is_planned_all_the_same(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("inferencex.recipes.pipeline.run.expected_bytes", lambda source: None)
    arguments = [str(recipe), "--dry-run", "--set", "source.model=someone/something"]
    assert exit_status(app, "inferencex pipeline", arguments) == 0
    assert "?" in capfd.readouterr().out


def test_unreachable_hub_leaves_the_plan_without_figures(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def unreachable(*arguments: object, **options: object) -> None:
        raise transport_error()("Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    arguments = [str(recipe), "--dry-run", "--set", "source.model=someone/something"]
    assert exit_status(app, "inferencex pipeline", arguments) == 0
    assert "?" in capfd.readouterr().out

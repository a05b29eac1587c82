"""`inferencex compare`: the figures of `inferencex eval` side by side, with size, speed and plots."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from inferencex.cli.console import exit_status
from inferencex.recipes.compare import app
from tests.recipes.evaluation import questions


def test_bundles_on_a_text(
    tmp_path: Path, none_bundle: Path, int4_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--windows", "2", "--length", "32", "--output", str(tmp_path / "out"), "--json"]
    assert exit_status(app, "compare", [str(none_bundle), str(int4_bundle), *arguments]) == 0
    reference, coarse = json.loads(capsys.readouterr().out)
    assert reference["mean_kl"] == 0.0 and coarse["mean_kl"] > 0.0
    assert coarse["size_bytes"] < reference["size_bytes"]
    assert coarse["speed"]["prefill_tokens_per_second"] > 0 and coarse["speed"]["decode_tokens_per_second"] > 0
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert written["bundles"] == [reference, coarse] and written["reference"] == str(none_bundle)
    assert "![pareto-speed](pareto-speed.svg)" in (tmp_path / "out" / "results.md").read_text()
    for name in ("pareto-size.svg", "pareto-speed.svg"):
        ElementTree.parse(tmp_path / "out" / name)


def test_bundles_by_a_recipe(
    tmp_path: Path, none_bundle: Path, int4_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions.write_all(tmp_path)
    (tmp_path / "recipe.yaml").write_text(
        "engine: {threads: 1}\nfidelity: {windows: 2, length: 32}\n"
        "tasks:\n  piqa: {path: piqa.jsonl, labels: piqa.lst}\n"
        "thresholds: {max_kl: 1e-7, min_relative_accuracy: 0.0}\n"
    )
    arguments = ["--recipe", str(tmp_path / "recipe.yaml"), "--no-speed"]
    assert (
        exit_status(app, "compare", [str(none_bundle), str(int4_bundle), str(none_bundle), *arguments, "--json"]) == 0
    )
    captured = capsys.readouterr()
    reference, coarse, same = json.loads(captured.out)
    assert "another form of the recipe" not in captured.err
    assert [row["passed"] for row in (reference, coarse, same)] == [None, False, True]
    assert reference["scores"] == same["scores"] and set(coarse["scores"]) == {"piqa"}
    assert reference["speed"] is None
    assert exit_status(app, "compare", [str(none_bundle), str(int4_bundle), *arguments]) == 0
    assert "missed" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--text", "--windows", "--length", "--backend", "--activation-dtype"])
def test_what_a_recipe_says_is_not_said_twice(
    tmp_path: Path, none_bundle: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "4").touch()
    arguments = [str(none_bundle), str(none_bundle), "--recipe", "smoke", option, str(tmp_path / "4")[-1:]]
    assert exit_status(app, "compare", arguments) == 1
    assert f"{option} is not for comparing with --recipe" in capsys.readouterr().err.replace("\n", " ")


def test_a_limit_needs_a_recipe(none_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(app, "compare", [str(none_bundle), str(none_bundle), "--limit", "2"]) == 1
    assert "--limit is about a recipe's questions" in capsys.readouterr().err

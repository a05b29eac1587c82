"""`inferencex eval` from its command line: thresholds decide the exit status, and all reports say the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("lm_eval", reason="needs the package lm-eval")

from inferencex.cli.console import exit_status
from inferencex.formats.errors import RecipeError
from inferencex.recipes.evaluation.cli import app
from inferencex.recipes.evaluation.results import read_evaluation
from tests.recipes.evaluation import questions

FIDELITY = "engine: {threads: 1}\nfidelity: {windows: 4, length: 32}\n"


class Ran:
    """What one run of the command did."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: object) -> None:
        self.status = exit_status(app, "inferencex eval", [str(each) for each in arguments])
        self.out, self.err = capsys.readouterr()


def _recipe(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def test_a_bundle_as_good_as_its_baseline_passes(
    tmp_path: Path, none_bundle: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The baseline is a checkpoint: converting it gives the same model again."""
    recipe = _recipe(tmp_path, FIDELITY + "thresholds: {max_kl: 1e-6, max_p99_kl: 1e-6, min_same_top1: 1.0}\n")
    ran = Ran(capsys, none_bundle, "--recipe", recipe, "--baseline", tiny, "--output", tmp_path / "out")
    assert ran.status == 0, ran.err
    assert "converting" in ran.err and "fidelity: 4 of 4" in ran.err
    assert ran.out.count("passed") == 3 and "mean KL" in ran.out
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["passed"] and found["fidelity"]["mean_kl"]["value"] < 1e-6
    assert found["fidelity"]["baseline_perplexity"] == pytest.approx(found["fidelity"]["perplexity"]["value"])
    low, high = (found["fidelity"]["perplexity"][end] for end in ("low", "high"))
    assert low < found["fidelity"]["perplexity"]["value"] < high


def test_a_bundle_that_is_too_coarse_fails_with_the_numbers(
    tmp_path: Path, none_bundle: Path, int4_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = _recipe(tmp_path, FIDELITY + "thresholds: {max_kl: 1e-6, min_same_top1: 0.0}\n")
    arguments = (int4_bundle, "--recipe", recipe, "--baseline", none_bundle, "--output", tmp_path / "out")
    ran = Ran(capsys, *arguments)
    assert ran.status == 1
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    kl = found["fidelity"]["mean_kl"]["value"]
    assert kl > 1e-6 and not found["passed"]
    line = f"max_kl: {kl:.6g}, but must be at most 1e-06"
    assert f"FAILED  {line}" in ran.out and "1 of 2 thresholds do not hold" in ran.err
    assert f"| max_kl | {kl:.6g} | at most 1e-06 | **does not hold** |" in (tmp_path / "out" / "results.md").read_text()
    suite = ElementTree.parse(tmp_path / "out" / "junit.xml").getroot()[0]
    assert suite.get("tests") == "2" and suite.get("failures") == "1"
    failed = {case.get("name"): case.find("failure") for case in suite}
    assert failed["threshold.min_same_top1"] is None
    failure = failed["threshold.max_kl"]
    assert failure is not None and failure.get("message") == line
    assert Ran(capsys, *arguments, "--set", "thresholds.max_kl=10").status == 0


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, none_bundle: Path) -> Path:
    """Results of the unquantized bundle, with all kinds of tasks."""
    folder = tmp_path_factory.mktemp("stored")
    questions.write_all(folder)
    _recipe(folder, "engine: {threads: 1}\nperplexity: {windows: 2, length: 32}\n" + questions.TASKS)
    arguments = [str(none_bundle), "--recipe", str(folder / "recipe.yaml"), "--output", str(folder / "out")]
    assert exit_status(app, "inferencex eval", arguments) == 0
    return folder


def test_tasks_are_compared_with_stored_results(
    stored: Path, none_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = ("thresholds.min_relative_accuracy=1.0", "thresholds.max_relative_perplexity=1.0001")
    settings = [part for limit in limits for part in ("--set", limit)]
    arguments = (none_bundle, "--recipe", stored / "recipe.yaml", "--baseline", stored / "out", *settings)
    ran = Ran(capsys, *arguments, "--json", "--output", stored / "again")
    assert ran.status == 0, ran.err
    found = json.loads(ran.out)
    assert found == json.loads((stored / "again" / "results.json").read_text())
    assert len(found["checks"]) == 5 and all(check["passed"] for check in found["checks"])
    assert "another form of the recipe" not in ran.err
    junit = ElementTree.parse(stored / "again" / "junit.xml").getroot()
    names = [case.get("name") for case in junit.iter("testcase")]
    assert names[:4] == ["task.arc_easy", "task.piqa", "task.lambada_openai", "task.gsm8k"] and len(names) == 9

    worse = json.loads((stored / "out" / "results.json").read_text())
    for task in worse["tasks"]:
        task["score"] += 1.0
        task["metrics"] = {}
    (stored / "better.json").write_text(json.dumps(worse))
    ran = Ran(capsys, *arguments[:4], stored / "better.json", *settings)
    assert ran.status == 1 and "FAILED  min_relative_accuracy.arc_easy" in ran.out


def test_stored_results_must_be_of_the_same_questions(
    stored: Path, none_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (none_bundle, "--recipe", stored / "recipe.yaml", "--baseline", stored / "out", "--limit", 1)
    ran = Ran(capsys, *arguments)
    assert ran.status == 1 and "was measured with --limit None, this evaluation has 1" in ran.err


def test_tasks_are_compared_with_a_model(
    stored: Path, none_bundle: Path, int4_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At a limit of one question a score is all or nothing: the check is about numbers that are known."""
    arguments = (int4_bundle, "--recipe", stored / "recipe.yaml", "--baseline", none_bundle, "--limit", 1, "--json")
    ran = Ran(
        capsys, *arguments, "--set", "thresholds.min_relative_accuracy=0.0", "--set", "thresholds.min_score={piqa: 0}"
    )
    assert ran.status == 0, ran.err
    found = json.loads(ran.out)
    assert set(found["baseline"]["scores"]) == {"arc_easy", "piqa", "lambada_openai", "gsm8k"}
    assert [task["samples"] for task in found["tasks"]] == [1, 1, 1, 1]
    assert f"tasks of the baseline {none_bundle}" in ran.err


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (FIDELITY, [], "measures fidelity to a model, and there is none; give --baseline"),
        (FIDELITY, ["--baseline", "{stored}"], "holds figures only"),
        ("tasks: {piqa: }\nthresholds: {min_relative_accuracy: 1}\n", [], "compares with a baseline"),
        (
            "tasks: {winogrande: }\nthresholds: {min_relative_accuracy: 1}\n",
            ["--baseline", "{stored}"],
            "has no score of winogrande to compare with",
        ),
        (FIDELITY, ["--baseline", "{none}", "--baseline", "{none}"], "give one model, one results.json"),
        ("fidelity: {text: absent.txt}\n", ["--baseline", "{none}"], "there is no file absent.txt, and as a dataset"),
        ("perplexity: {length: 999999}\n", [], "less than one window of 999999"),
        (FIDELITY, ["--baseline", "absent.json"], "absent.json: cannot be read"),
    ],
)
def test_what_cannot_be_evaluated(
    tmp_path: Path,
    stored: Path,
    none_bundle: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    options: list[str],
    message: str,
) -> None:
    places = {"stored": stored / "out", "none": none_bundle}
    given = [option.format(**places) for option in options]
    ran = Ran(capsys, none_bundle, "--recipe", _recipe(tmp_path, text), *given)
    assert ran.status == 1 and message in ran.err, ran.err


def test_a_folder_that_is_no_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, tmp_path, "--recipe", _recipe(tmp_path, "perplexity: {}\n"))
    assert ran.status == 1 and "is no bundle" in ran.err


def test_results_are_read_back(stored: Path, tmp_path: Path) -> None:
    path = stored / "out" / "results.json"
    document: dict[str, Any] = json.loads(path.read_text())
    assert json.loads(json.dumps(read_evaluation(path).to_json())) == document
    for broken, message in (("{}", "is no results.json"), ("[", "is no results.json"), ('{"format": 9}', "format 9")):
        (tmp_path / "broken.json").write_text(broken)
        with pytest.raises(RecipeError, match=message):
            read_evaluation(tmp_path / "broken.json")


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, "--schema")
    assert ran.status == 0 and "thresholds" in json.loads(ran.out)["properties"]

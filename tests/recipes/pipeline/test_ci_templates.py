"""The templates for CI are YAML of the form their services read, and all they call exists."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from inferencex.cli.main import COMMANDS
from inferencex.recipes.pipeline.options import command_options
from tests.recipes.pipeline.conftest import ROOT

TEMPLATES = {path.name: path for path in (ROOT / "recipes/ci").glob("*.yaml")}


def scripts(document: Any) -> Iterator[str]:
    """Every script of a template: GitHub's `run`, GitLab's `script` and its neighbours."""
    if isinstance(document, dict):
        for key, value in document.items():
            if key == "run":
                yield value
            elif key in ("script", "before_script", "after_script"):
                yield from value
            else:
                yield from scripts(value)
    elif isinstance(document, list):
        for value in document:
            yield from scripts(value)


def load(name: str) -> Any:
    return yaml.safe_load(TEMPLATES[name].read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_command_and_option_exists(name: str) -> None:
    text = "\n".join([*scripts(load(name)), *re.findall(r"`(inferencex [^`]+)`", TEMPLATES[name].read_text("utf-8"))])
    calls = re.findall(r"inferencex ([a-z]+)((?: [^;\n]*)?)", text)
    assert {command for command, _ in calls} == {"pipeline", "verify", "sign"}
    for command, rest in calls:
        known = command_options(COMMANDS[command].module)
        for word in shlex.split(rest):
            if word.startswith("--"):
                flags = {flag for option in known.values() for flag in (*option.opts, *option.secondary_opts)}
                assert word.partition("=")[0] in flags, f"inferencex {command} has no {word}"


@pytest.mark.parametrize("name", TEMPLATES)
def test_extras_and_the_recipe_exist(name: str) -> None:
    text = TEMPLATES[name].read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (named,) = re.findall(r"pip install 'inferencex\[([a-z,]+)\]'", text)
    assert set(named.split(",")) <= set(extras)
    assert (ROOT / "recipes/pipelines/chat-int4-balanced.yaml").is_file() and "chat-int4-balanced" in text


def test_github_keeps_the_report_of_a_failed_job() -> None:
    job = load("github-actions.yaml")["jobs"]["model"]
    steps = {step.get("name", step.get("uses")): step for step in job["steps"]}
    assert steps["Report"]["if"] == steps["Summary"]["if"] == "always()"
    kept = steps["Keep finished steps and downloads"]
    restored = steps["Finished steps and downloads"]["with"]
    assert kept["if"] == "always()" and restored["path"] == kept["with"]["path"]
    assert all("continue-on-error" not in step for step in job["steps"])
    run = steps["Convert, check, publish"]["run"]
    assert "--report-dir report" in run and "||" not in run and "|" not in run
    assert "report/summary.md" in steps["Summary"]["run"] and "GITHUB_STEP_SUMMARY" in steps["Summary"]["run"]
    assert all(re.fullmatch(r"[\w-]+(/[\w-]+)+@v\d+", step["uses"]) for step in job["steps"] if "uses" in step)


def test_gitlab_reads_the_junit_report() -> None:
    job = load("gitlab-ci.yaml")["model"]
    assert job["artifacts"]["reports"]["junit"] == "report/junit.xml" and job["artifacts"]["when"] == "always"
    assert "allow_failure" not in job and any("--report-dir report" in line for line in job["script"])

"""What the documentation says holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests import module_list

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_every_module_is_described() -> None:
    assert (ROOT / "docs" / "modules.md").read_text(encoding="utf-8") == module_list.page()
    for package in module_list.PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            assert module_list.summary(path) or path.stat().st_size == 0, f"{path} has no docstring"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_and_files_exist(page: Path) -> None:
    text, makefile = page.read_text(encoding="utf-8"), (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make ([a-z]+)`", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name} names make {target}"
    for path in re.findall(r"`((?:cli|convert|formats|runtime|recipes|tests|bench)/[\w/.]+)`", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_options_in_the_readme_exist() -> None:
    from inferencex.cli.export import app as export
    from inferencex.cli.inspect import app as inspect
    from inferencex.convert.cli import app as convert
    from inferencex.recipes.compare import app as compare
    from inferencex.recipes.evaluation.cli import app as evaluate
    from inferencex.recipes.pipeline.cli import app as pipeline
    from inferencex.runtime.cli import app as run
    from inferencex.runtime.server.cli import app as serve

    runner = CliRunner()
    known = "".join(
        runner.invoke(app, ["--help"], env={"COLUMNS": "240"}).output
        for app in (convert, run, inspect, compare, evaluate, export, serve, pipeline)
    )
    for option in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (ROOT / "README.md").read_text(encoding="utf-8"))):
        assert option in known, f"the README names {option}"

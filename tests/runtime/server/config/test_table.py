from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from inferencex.runtime.server.config.catalogue import keys
from inferencex.runtime.server.config.layers import OTHER_VARIABLES
from inferencex.runtime.server.config.load import load_settings
from tests import settings_table

ROOT = Path(__file__).resolve().parents[4]


def test_the_table_in_the_documentation_is_in_step() -> None:
    page = settings_table.PAGE.read_text(encoding="utf-8")
    assert settings_table.with_table(page) == page, "run: python -m tests.settings_table"


def test_variables_that_other_parts_read_are_not_taken_for_mistakes() -> None:
    read = set()
    for package in ("cli", "convert", "formats", "recipes", "runtime"):
        for path in (ROOT / package).rglob("*.py"):
            if "server" not in path.parts:
                read |= set(re.findall(r'"(INFERENCEX_[A-Z_]+)"', path.read_text(encoding="utf-8")))
    # The key that clients send: who sets it for a server means that it asks for one, and is told how to.
    assert read and read - {"INFERENCEX_API_KEY"} <= OTHER_VARIABLES


@pytest.mark.parametrize("path", sorted((ROOT / "deploy").rglob("config*.yaml")), ids=str)
def test_configurations_to_deploy_are_understood(path: Path) -> None:
    if "model" in (yaml.safe_load(path.read_text(encoding="utf-8")) or {}):
        assert load_settings({}, {}, path).settings.model.path


def test_variables_and_flags_that_pages_and_deployments_name_exist() -> None:
    pages = [ROOT / "docs" / "serving.md", ROOT / "docs" / "deploying.md"]
    pages += [
        path for path in (ROOT / "deploy").rglob("*") if path.suffix in (".yaml", ".yml", ".sh", ".service", ".md")
    ]
    variables, flags = {key.variable for key in keys()}, {key.flag for key in keys()}
    flags |= {key.off_flag for key in keys() if key.off_flag}
    flags |= {"--config", "--print-config", "--generate-key", "--hash-key"}
    for page in pages:
        text = page.read_text(encoding="utf-8")
        named = set(re.findall(r"INFERENCEX_[A-Z]+__[A-Z_]+", text))
        assert named <= variables, page
        commands = re.findall(r"inferencex serve((?:[^\n`]|\\\n)*)", text)
        assert {flag for command in commands for flag in re.findall(r"--[a-z][a-z-]+", command)} <= flags, page

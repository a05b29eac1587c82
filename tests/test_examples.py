"""Every example runs as its first line says, on a small model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture(scope="module")
def converted(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A bundle made by the example that converts, and what it printed."""
    bundle = tmp_path_factory.mktemp("examples") / "bundle"
    return bundle, _run("convert.py", str(shared_data / "stories260k"), str(bundle))


def _run(name: str, *arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_convert(converted: tuple[Path, str]) -> None:
    bundle, printed = converted
    assert (bundle / "bundle.json").exists()
    assert "## Against the source" in printed and "they are excluded" in printed


@pytest.mark.parametrize("example", ["generate.py", "stream.py"])
def test_runs_on_a_bundle(converted: tuple[Path, str], example: str) -> None:
    assert len(_run(example, str(converted[0]))) > 40


def test_word_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does in a server is tested with the server's command."""
    pytest.importorskip("fastapi", reason="filters need the extra serve")
    from inferencex.runtime.server.filters import load_filters

    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("WORDS", "tea, coffee")
    loaded = load_filters(["word_filter:Words"])
    assert loaded.checks_input and loaded.checks_output


def test_there_is_a_test_for_every_example() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"convert.py", "generate.py", "stream.py", "word_filter.py"}

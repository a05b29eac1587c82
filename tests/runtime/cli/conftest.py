"""The command with the scripted model, in this process and as a program."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from inferencex.cli.console import exit_status
from inferencex.runtime.cli import command

SCRIPT = Path(__file__).with_name("scripted.py")


def _load_scripted() -> Any:
    spec = importlib.util.spec_from_file_location("scripted", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scripted"] = module
    spec.loader.exec_module(module)
    return module


scripted = _load_scripted()


@dataclass(frozen=True)
class Result:
    """What a run of the command left."""

    status: int
    out: str
    err: str


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a chat template."""
    folder: Path = scripted.write_bundle(tmp_path_factory.mktemp("bundles") / "chat")
    return folder


@pytest.fixture(scope="session")
def plain_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle without one."""
    folder: Path = scripted.write_bundle(tmp_path_factory.mktemp("bundles") / "plain", chat=False)
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run the command; `stdin` is what is piped in, `stop_at` the step at which Ctrl-C is pressed."""

    def call(*arguments: object, stdin: bytes = b"", stop_at: int | None = None) -> Result:
        monkeypatch.setattr(command, "load", lambda folder, engine: scripted.load(folder, engine, stop_at))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capfd.readouterr()
        status = exit_status(command.app, "inferencex-run", [str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return Result(status, captured.out, captured.err)

    return call


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Start of the command line that runs the command as a program."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    return [sys.executable, str(SCRIPT)]

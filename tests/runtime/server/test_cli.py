from __future__ import annotations

import io
from pathlib import Path

import pytest
import yaml

from inferencex.cli.console import exit_status
from inferencex.runtime.server.access.hashing import parse_key
from inferencex.runtime.server.cli import app
from inferencex.runtime.server.config.catalogue import keys


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INFERENCEX_CONFIG", "INFERENCEX_SHARED_DATA", "INFERENCEX_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "240")


def serve(*arguments: str) -> int:
    return exit_status(app, "inferencex serve", arguments, "serve")


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("--help") == 0
    shown = capsys.readouterr().out
    for key in keys():
        assert key.flag in shown and (key.off_flag or "") in shown
    assert "[default: 127.0.0.1]" in shown


def test_every_kind_of_flag_reaches_its_setting(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("engine: {enable_prefix_caching: false, threads: 3}\nserver: {docs: false}\n")
    flags = ["--model-path", "a", "--model-path", "b", "--kv-cache-memory", "2GiB", "--enable-prefix-caching"]
    flags += ["--no-page", "--drain-timeout", "1.5", "--protect", "metrics", "--api-key", "a-secret-key"]
    assert serve("--config", str(config), *flags, "--print-config") == 0
    captured = capsys.readouterr()
    shown = yaml.safe_load(captured.out)
    assert shown["model"]["path"] == ["a", "b"]
    assert (shown["engine"]["kv_cache_memory"], shown["engine"]["threads"]) == (2 << 30, 3)
    assert shown["engine"]["enable_prefix_caching"] is True
    server = shown["server"]
    assert (server["page"], server["docs"], server["drain_timeout"]) == (False, False, 1.5)
    assert server["protect"] == ["metrics"]
    assert "a-secret-key" not in captured.out + captured.err


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (("--prot", "1"), 2, "No such option: --prot"),
        (("--port", "x"), 1, "--port is 'x', expected an integer"),
        (("--api-key", "short"), 1, "--api-key: server.api_keys[0].key: "),
        (("--config", "absent.yaml"), 1, "--config absent.yaml: No such file"),
        (("--protect", "docs"), 1, "protect names what needs a key, and there are no keys"),
    ],
)
def test_mistakes_are_one_line(
    flags: tuple[str, ...], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve(*flags, "--print-config") == status
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error


def test_keys_are_made_and_hashed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve("--generate-key") == 0
    key = capsys.readouterr().out.strip()
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{key}\n"))
    assert serve("--hash-key") == 0
    hashed = capsys.readouterr().out.strip()
    assert hashed.startswith("sha256:") and parse_key(hashed).matches(key.encode())
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert serve("--hash-key") == 1

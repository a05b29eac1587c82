"""`inferencex tune` says what was chosen, and where that is kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("triton", reason="needs triton, which is for Linux")

from inferencex.cli.tune import app
from inferencex.formats.errors import BackendError
from inferencex.runtime.backends.base import BackendOptions
from inferencex.runtime.backends.triton import tune
from inferencex.runtime.backends.triton.tuning import Config


def test_what_is_chosen_is_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def tune_bundle(bundle: Path, options: BackendOptions, tokens: list[int], *, again: bool) -> Iterator[tune.Tuned]:
        asked.update(bundle=bundle, options=options, tokens=tokens, again=again)
        yield tune.Tuned("scaled_linear", "int8 N8 K8 T1", Config.of(4, 3, BLOCK_M=16))
        yield tune.Tuned("decode_attention", "4/2 heads", Config.of(8, 2, SPLIT=512))

    monkeypatch.setattr(tune, "tune_bundle", tune_bundle)
    monkeypatch.setattr(tune, "tuning_path", lambda device: tmp_path / f"{device}.json")
    arguments = [
        "a-bundle",
        "--device",
        "cuda:1",
        "--tokens",
        "3",
        "--tokens",
        "9",
        "--kv-cache-dtype",
        "fp8",
        "--again",
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].startswith("scaled_linear int8 N8 K8 T1: ") and lines[1].startswith("decode_attention 4/2 heads: ")
    assert lines[2] == f"2 classes of shapes: {tmp_path / 'cuda:1.json'}"
    assert (asked["bundle"], asked["tokens"], asked["again"]) == (Path("a-bundle"), [3, 9], True)
    assert (asked["options"].device, asked["options"].kv_cache_dtype) == ("cuda:1", "fp8")


def test_help_says_which_tokens_are_measured() -> None:
    assert "a few from 1 to 1024" in CliRunner().invoke(app, ["--help"], env={"COLUMNS": "240"}).output


def test_without_a_gpu_it_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def nothing(device: str) -> Path:
        raise BackendError("no GPU is usable here")

    monkeypatch.setattr(tune, "tuning_path", nothing)
    result = CliRunner().invoke(app, [str(tmp_path)])
    assert isinstance(result.exception, BackendError) and "no GPU" in str(result.exception)

"""The figures of docs/parallel.md come from a script that works."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra inferencex[parallel]")

from bench import ranks
from tests.runtime.server.serving import write_tiny_bundle


def test_two_ranks_are_compared_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = write_tiny_bundle(tmp_path / "tiny")
    monkeypatch.setattr(ranks, "DECODED", 4)
    monkeypatch.setattr(sys, "argv", ["ranks", str(bundle), "--ranks", "2", "--tokens", "24"])
    ranks.main()
    said = capsys.readouterr().out
    assert float(re.search(r"activations float32: on 2 ranks logits differ by (\S+)", said)[1]) < 1e-4  # type: ignore[index]
    assert len(re.findall(r"[12] ranks?, 2 threads in all: [\d.]+ tokens/s", said)) == 2

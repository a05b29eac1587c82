"""The harness with a tool that makes things up: processes, what is kept, and what failures say."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.accuracy.figures import compare
from bench.accuracy.reference import Reference
from bench.accuracy.run import ROOT, Harness, ProcessError
from bench.accuracy.tools.base import Row, Task
from tests.bench.accuracy.fake_worker import VOCAB, Fake, peaked

ROW = Fake.rows[0]
Make = Callable[[int], Harness]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT}/tests/bench/accuracy/fake_worker.py" "$@"\n')
    interpreter.chmod(0o755)
    windows = np.random.default_rng(0).integers(0, VOCAB, (3, 10))

    def harness(height: int) -> Harness:
        task = Task(tmp_path, tmp_path / "ids.npy", (), 1, 4, 10, 1)
        np.save(task.token_ids, np.full((1, 4), height))
        hidden = torch.from_numpy(np.stack([peaked(window, 2.0) for window in windows]))
        return Harness(task, Reference(windows, hidden, torch.eye(VOCAB)), tmp_path, {"nncf": str(interpreter)})

    return harness


def test_a_row_is_converted_and_compared(make: Make) -> None:
    harness = make(5)
    assert harness.version("nncf") == "fake 1.2"
    found = harness.measure("nncf", ROW, "fake 1.2", again=False)
    windows = harness.reference.windows
    expected = compare(
        [peaked(window, 2.0) for window in windows], [peaked(window, 5.0) for window in windows], windows
    )
    assert found.mean_kl == pytest.approx(expected.mean_kl)
    assert found.perplexity == pytest.approx(expected.perplexity)
    assert (found.tool, found.row, found.version, found.bits, found.same_top1) == ("nncf", "awq", "fake 1.2", 4.25, 1.0)
    assert 0 < found.seconds < 600
    assert 1e6 < found.peak_memory < 1e11


def test_a_conversion_is_kept_until_another_is_asked_for(make: Make, tmp_path: Path) -> None:
    first = make(5).measure("nncf", ROW, "fake 1.2", again=False)
    kept = make(7).measure("nncf", ROW, "fake 1.2", again=False)
    assert (kept.mean_kl, kept.seconds) == (first.mean_kl, first.seconds)
    assert make(7).measure("nncf", ROW, "fake 1.2", again=True).mean_kl > first.mean_kl
    assert (tmp_path / "conversions.txt").read_text() == "awq\nawq\n"


def test_a_conversion_that_fails_says_why_and_is_not_kept(make: Make) -> None:
    with pytest.raises(ProcessError, match=r"heights are above 0 \(status 1\); .*nncf\.awq\.convert\.log"):
        make(-1).measure("nncf", ROW, "fake 1.2", again=False)
    assert make(5).measure("nncf", ROW, "fake 1.2", again=False).same_top1 == 1.0


def test_a_model_that_does_not_load_says_why(make: Make) -> None:
    with pytest.raises(ProcessError, match="this model cannot be loaded"):
        make(13).measure("nncf", ROW, "fake 1.2", again=False)


def test_a_tool_that_is_not_installed_is_named(tmp_path: Path, make: Make) -> None:
    harness = make(5)
    missing = Harness(harness.task, harness.reference, tmp_path, {"gptqmodel": sys.executable})
    (tmp_path / "gptqmodel.py").write_text("raise ImportError('no package gptqmodel here')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        with pytest.raises(ProcessError, match="no package gptqmodel here"):
            missing.version("gptqmodel")


def test_a_row_of_activations_keeps_them(make: Make) -> None:
    row = Row("awq", "peaked", "awq", "int8")
    assert make(5).measure("nncf", row, "fake 1.2", again=False).activations == "int8"

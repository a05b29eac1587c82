"""The GPU benchmark runs whole in Triton's interpreter, so that it is known to work where there is a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton, which is for Linux")


def run(*arguments: str, interpreted: bool) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_INTERPRET": "1"} if interpreted else {}
    return subprocess.run(
        [sys.executable, "-m", "bench.gpu", *arguments],
        cwd=ROOT, env={**environment, "COLUMNS": "200"}, capture_output=True, text=True,
    )  # fmt: skip


def test_kernels_and_model(tmp_path: Path) -> None:
    result = run("--folder", str(tmp_path), interpreted=True)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    for text in (
        "INT4 linear",
        "W8A8",
        "decode attention",
        "prefill attention",
        "sampling",
        "decode x3",
        "prefill of 12",
    ):
        assert text in result.stdout
    assert "more than" not in result.stdout


def test_wrong_numbers_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    import torch
    from rich.console import Console

    from bench.gpu import __main__ as command
    from bench.gpu.cases import TINY, all_cases
    from bench.gpu.limits import Limits
    from inferencex.runtime.backends.triton.devices import Device

    def broken(*arguments: object) -> object:
        case = next(case for case in all_cases(TINY, torch.device("cpu"), torch.float32) if "gated" in case.name)
        yield replace(case, run=lambda: case.expected() * 1.01)

    monkeypatch.setattr(command, "all_cases", broken)
    device = Device("interpreter", 0, "test", "interpreter", 0)
    console = Console(quiet=True)
    assert command.kernels(console, device, TINY, torch.float32, Limits(1.0, 1.0)) == 1


def test_without_a_gpu_it_says_how_to_try() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    result = run(interpreted=False)
    assert result.returncode == 2
    assert "TRITON_INTERPRET=1" in result.stdout

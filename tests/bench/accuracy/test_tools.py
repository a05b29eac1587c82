"""Every adapter keeps the contract, and asks for what the command line and the packages know."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.accuracy.run import ROOT
from bench.accuracy.tools import NAMES, OURS, find_tool
from bench.accuracy.tools.base import Task
from bench.accuracy.tools.llama_cpp import _as_argument
from bench.accuracy.tools.ours import _OPTIONS
from inferencex.convert.quantize import parse_scheme

PACKAGES = {
    OURS: "inferencex.convert",
    "llm-compressor": "llmcompressor",
    "autoround": "auto_round",
    "llama.cpp": "llama_cpp",
}


@pytest.mark.parametrize("name", NAMES)
def test_adapters_are_found_by_name_without_their_packages(name: str) -> None:
    tool = find_tool(name)
    assert tool.name == name
    assert tool.settings
    assert len({row.name for row in tool.rows}) == len(tool.rows) > 0
    absent = (PACKAGES.get(name, name), "torch", "transformers")
    script = (
        f"import sys, bench.accuracy.tools as t; t.find_tool({name!r}); assert not {{*{absent!r}}} & {{*sys.modules}}"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_our_conversions_are_schemes_that_there_are() -> None:
    tool = find_tool(OURS)
    assert {row.conversion for row in tool.rows} == set(_OPTIONS)
    for row in tool.rows:
        scheme = parse_scheme(_OPTIONS[row.conversion][1])
        assert scheme.linear is not None
        activation = scheme.linear.activation
        assert row.activations == (activation.type if activation is not None else "float32")
        assert row.floats == (scheme.linear.number != "int")


def test_a_task_survives_the_command_line(tmp_path: Path) -> None:
    task = Task(tmp_path, tmp_path / "ids.npy", (tmp_path / "a.txt", tmp_path / "b.txt"), 4, 32, 64, 2)
    np.save(task.token_ids, np.arange(128).reshape(4, 32))
    again = Task.parse(task.dump())
    assert again == task
    assert again.windows().shape == (4, 32)


def test_the_importance_matrix_ends_with_an_entry_without_a_name() -> None:
    api = pytest.importorskip("llama_cpp")
    importance = {"blk.0.attn_q.weight": np.arange(4, dtype=np.float32), "blk.0.ffn_up.weight": np.ones(2, np.float32)}
    entries = _as_argument(api, importance)
    assert [(entry.name, entry.size) for entry in entries] == [
        (b"blk.0.attn_q.weight", 4),
        (b"blk.0.ffn_up.weight", 2),
        (None, 0),
    ]
    assert entries[0].data[3] == 3.0

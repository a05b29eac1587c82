"""Every adapter keeps the contract, and asks for what the command line and the packages know."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from bench.accuracy.run import ROOT
from bench.accuracy.tools import NAMES, OURS, find_tool
from bench.accuracy.tools.base import Task
from bench.accuracy.tools.llama_cpp import _as_argument
from bench.accuracy.tools.ours import arguments
from inferencex.convert.cli import app
from inferencex.convert.quantize import parse_scheme
from inferencex.formats.errors import SourceError

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


@pytest.mark.parametrize("conversion", sorted({row.conversion for row in find_tool(OURS).rows}))
def test_our_conversions_are_what_the_command_line_takes(conversion: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Some text.")
    task = Task(tmp_path / "nowhere", tmp_path / "ids.npy", (text, text), 4, 32, 64, 2)
    result = CliRunner().invoke(app, arguments(conversion, task, tmp_path / "bundle"))
    assert isinstance(result.exception, SourceError), result.output
    assert "nowhere" in str(result.exception)


def test_rows_say_what_our_schemes_do() -> None:
    for row in find_tool(OURS).rows:
        given = arguments(row.conversion, Task(Path(), Path(), (), 1, 32, 64, 1), Path())
        if "--target-bits" not in given:
            linear = parse_scheme(given[given.index("--quantization") + 1]).linear
            assert linear is not None
            assert row.activations == (linear.activation.type if linear.activation is not None else "float32")
            assert row.floats == (linear.number != "int")


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

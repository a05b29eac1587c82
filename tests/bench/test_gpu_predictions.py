"""What is predicted for GPUs follows from the machine code of today's kernels."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.predictions import COPIES_REACH, OVERLAP, SCHEMES, scheme

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton, which is for Linux")

_COUNTED = ("INT4, groups of 32", "NVFP4", "MXFP4")
_PROGRAM = """
import json, sys
from bench.gpu.predictions import SCHEMES, count
print(json.dumps({each.name: count(each).instructions for each in SCHEMES if each.name in sys.argv[1:]}))
"""


def test_instructions_are_those_of_the_table() -> None:
    """Counted in a process of its own, for kernels that were defined for the interpreter cannot be compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *_COUNTED], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-3000:]
    counted = json.loads(result.stdout.splitlines()[-1])
    table = {each.name: each.instructions for each in SCHEMES if each.name in _COUNTED}
    assert counted == pytest.approx(table, rel=0.02)


def test_what_is_predicted() -> None:
    wide = scheme("int4", 128, is_symmetric=True)
    assert wide.bytes_per_weight == 0.5 + 2 / 128 and wide.predicted == OVERLAP * COPIES_REACH
    small = scheme("e2m1", 16, is_symmetric=True)
    assert small.bytes_per_weight == 0.5 + 1 / 16 and small.predicted == OVERLAP * small.issue_limit < wide.predicted
    assert all(each.predicted > 0.59 for each in SCHEMES)

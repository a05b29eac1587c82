"""Every kernel compiles for every chip it is launched on, without one at hand, and spills nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.resources import SHARED_LIMITS, kernel_modules

ROOT = Path(__file__).parents[4]

# In a process of its own, for kernels that were defined for the interpreter cannot be compiled.
_PROGRAM = """
import json, sys
from dataclasses import asdict
from bench.gpu.resources import compile_module
print(json.dumps([asdict(one) for one in compile_module(sys.argv[1])]))
"""


@pytest.mark.parametrize("module", kernel_modules(), ids=lambda name: name.rsplit(".", 1)[1])
def test_compiles_and_spills_nothing(module: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM, module], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-3000:]
    compiled = json.loads(result.stdout.splitlines()[-1])
    assert compiled, "a module with variants has some"
    bad = [one for one in compiled if one["spilled"] or one["shared"] > SHARED_LIMITS[one["target"]]]
    assert bad == []

"""Runs a recipe with stand-ins for our commands in a process that can be killed: python driver.py RECIPE WORK_DIR.

DIE may also be a point of the pipeline's own: `keep:begin`, `keep:end`, `publish:begin`, `publish:end`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inferencex.recipes.pipeline.destinations import LocalDestination
from inferencex.recipes.pipeline.log import JsonLog
from inferencex.recipes.pipeline.run import PipelineOptions, run
from inferencex.recipes.pipeline.store import Store


def dying(point: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def around(*arguments: Any) -> Any:
        if os.environ.get("DIE") == f"{point}:begin":
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*arguments)
        if os.environ.get("DIE") == f"{point}:end":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return around


if __name__ == "__main__":
    Store.keep = dying("keep", Store.keep)  # type: ignore[method-assign]
    LocalDestination.put = dying("publish", LocalDestination.put)  # type: ignore[method-assign]
    options = PipelineOptions(Path(sys.argv[1]), work_dir=Path(sys.argv[2]), commands="tests.recipes.pipeline.commands")
    results = run(options, JsonLog())
    sys.exit(0 if all(result.good for result in results) else 1)

"""Commands of steps as tasks of a Ray cluster whose machines share the work directory."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inferencex.formats.errors import OptionError, RecipeError
from inferencex.recipes.pipeline.base import Estimate
from inferencex.recipes.pipeline.runner import COMMANDS, child_command
from inferencex.recipes.pipeline.store import LOG_FILE


def run_here(arguments: list[str], folder: str, module: str) -> int:
    """Run one command on the machine that the task was given to, and return its exit status."""
    with (Path(folder) / LOG_FILE).open("ab") as log:
        command = child_command(arguments, Path(folder), module)
        return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False).returncode


class RayRunner:
    """Tasks of a Ray cluster; Ray decides which of them fit the machines' memory.

    Every machine needs inferencex with what the steps need, and sees the work directory under the same path.
    """

    def __init__(self, address: str, module: str = COMMANDS) -> None:
        try:
            import ray
        except ModuleNotFoundError as error:
            raise OptionError("--ray needs the package ray, which is not installed; run: pip install ray") from error
        self._ray: Any = ray
        self._module = module
        try:
            ray.init(address=address, log_to_driver=False, ignore_reinit_error=True)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise OptionError(f"--ray {address}: no cluster answers there: {error}") from error
        # A step is continued by the next run of the pipeline, not behind its back.
        self._task = ray.remote(max_retries=0)(run_here)

    async def run(self, arguments: Sequence[str], folder: Path, estimate: Estimate) -> int:
        """See `Runner`."""
        task = self._task.options(num_cpus=1, memory=estimate.memory or 0).remote(
            list(arguments), str(folder), self._module
        )
        try:
            return int(await task)
        except self._ray.exceptions.RayError as error:
            raise RecipeError(f"the Ray cluster lost a step: {str(error).splitlines()[0]}") from error
        finally:
            self._ray.cancel(task, force=True)

"""Where the commands of steps run: child processes of this one, or tasks of a Ray cluster."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from inferencex.recipes.pipeline.base import Estimate
from inferencex.recipes.pipeline.store import LOG_FILE, USAGE_FILE

COMMANDS = "inferencex.cli.main"


class Runner(Protocol):
    """Runs commands; those of a run that ends for whatever reason end with it."""

    async def run(self, arguments: Sequence[str], folder: Path, estimate: Estimate) -> int:
        """Run `inferencex ARGUMENTS` with its output appended to the folder's log, and return its exit status."""
        ...


def child_command(arguments: Sequence[str], folder: Path, module: str) -> list[str]:
    """Return the whole command line of a child process."""
    child = "inferencex.recipes.pipeline.child"
    return [sys.executable, "-m", child, str(os.getpid()), str(folder / USAGE_FILE), module, *arguments]


class LocalRunner:
    """Child processes on this machine.

    lock:    file descriptor that children hold as long as they live
    module:  whose `main` is the command
    """

    def __init__(self, lock: int, module: str = COMMANDS) -> None:
        self._lock = lock
        self._module = module

    async def run(self, arguments: Sequence[str], folder: Path, estimate: Estimate) -> int:
        """See `Runner`."""
        with (folder / LOG_FILE).open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *child_command(arguments, folder, self._module),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(self._lock,),
            )
            try:
                return await process.wait()
            except asyncio.CancelledError:
                process.kill()
                await process.wait()
                raise

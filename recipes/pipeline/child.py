"""One of our commands in a process of its own, which ends when the pipeline that started it does.

`python -m inferencex.recipes.pipeline.child PARENT USAGE_FILE MODULE ARGUMENT...` runs `main` of the module.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import resource
import signal
import sys
from importlib import import_module
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the command that the arguments name."""
    parent, usage, module, *arguments = sys.argv[1:]
    if sys.platform == "linux":
        # Elsewhere the work directory's lock, which this process holds too, keeps the next run waiting.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit(1)  # it ended before this process could ask to end with it
    atexit.register(_write_usage, Path(usage))
    sys.argv = ["inferencex", *arguments]
    import_module(module).main()


def _write_usage(path: Path) -> None:
    """Write the most memory that this process had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    path.write_text(json.dumps({"peak_memory": peak * (1 if sys.platform == "darwin" else 1024)}), encoding="utf-8")


if __name__ == "__main__":
    main()

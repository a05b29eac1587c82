"""What runs in a fresh process of a tool's environment.

    python -m bench.accuracy.worker version TOOL ANSWER
    python -m bench.accuracy.worker convert TOOL ANSWER CONVERSION TASK FOLDER
    python -m bench.accuracy.worker bits TOOL ANSWER CONVERSION TASK FOLDER
    python -m bench.accuracy.worker logits TOOL ANSWER ROW TASK FOLDER WINDOWS

TASK is JSON: see `Task`. ANSWER is a file that gets one JSON object, or for `logits` float32 `[T, vocab]` of one window
after the other, in this machine's order of bytes, behind a line of JSON that says `vocab`; it may be a pipe.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.accuracy.tools import find_tool
from bench.accuracy.tools.base import Task


def peak_memory() -> int:
    """Return the most bytes that this process, or one that it started and waited for, had resident."""
    unit = 1 if sys.platform == "darwin" else 1024
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    status = Path("/proc/self/status")
    if status.exists():  # where the figure above may be that of the process that started this one
        found = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        own = int(found[0].split()[1]) * 1024 if found else own
    return max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit)


def write_logits(tool_name: str, row_name: str, task: Task, folder: Path, windows: Path, answer: Path) -> None:
    """Run the row `row_name` of a tool on every window of the file `windows`, int64 `[W, T]`, as numpy saves it."""
    tool = find_tool(tool_name)
    row = next(row for row in tool.rows if row.name == row_name)
    run = tool.load(row, task, folder)
    with answer.open("wb") as file:
        for place, window in enumerate(np.load(windows)):
            logits = np.ascontiguousarray(run(window), dtype=np.float32)
            if place == 0:
                file.write(json.dumps({"vocab": logits.shape[1]}).encode() + b"\n")
            file.write(logits.data)


def main(arguments: Sequence[str]) -> None:
    """Do one of the four tasks."""
    task, tool_name, answer, *rest = arguments
    if task == "logits":
        row, described, folder, windows = rest
        write_logits(tool_name, row, Task.parse(described), Path(folder), Path(windows), Path(answer))
        return
    tool = find_tool(tool_name)
    if task == "version":
        found: dict[str, object] = {"version": tool.version()}
    elif task == "convert":
        tool.convert(rest[0], Task.parse(rest[1]), Path(rest[2]))
        found = {"peak": peak_memory()}
    elif task == "bits":
        found = {"bits": tool.bits(rest[0], Task.parse(rest[1]), Path(rest[2]))}
    else:
        raise SystemExit(f"unknown task {task!r}")
    Path(answer).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

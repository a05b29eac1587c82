"""Seconds from the start of `inferencex-run` to the first token, and what they go into.

    python -m bench.startup BUNDLE [--repeat 9] [--prompt hi] [-- OPTIONS OF inferencex-run]

Every run is a process of its own, `inferencex-run BUNDLE --prompt hi --max-tokens 1`, timed from before it is started
to the first byte of its answer. The files are in the page cache and the bytecode is compiled: a first run sees to both
and is not counted. Then as many runs say how long each phase took, by `bench.startup_phases`, which makes them a little
slower. Figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.startup_phases import STARTED

PLAIN = "from inferencex.runtime.cli import main; main()"
PHASED = "from bench.startup_phases import main; main()"
ROOT = Path(__file__).resolve().parents[1]


def first_byte_seconds(arguments: Sequence[str]) -> float:
    """Start the command and return the seconds until its answer begins; SystemExit with its errors if there is none."""
    began = time.monotonic()
    command = [sys.executable, "-c", PLAIN, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=_environment(), bufsize=0, **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        first = process.stdout.read(1)
        seconds = time.monotonic() - began
        process.stdout.read()
        errors = process.stderr.read().decode(errors="replace")
    if not first or process.returncode:
        raise SystemExit(f"inferencex-run {' '.join(arguments)} failed:\n{errors}")
    return seconds


def _environment() -> dict[str, str]:
    """Return this process's environment, less what would keep the first run from leaving bytecode behind."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def phases(arguments: Sequence[str]) -> dict[str, float]:
    """Start the command once more and return the seconds that each of its phases took, in order."""
    environment = {**_environment(), STARTED: str(time.monotonic()), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PHASED, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"inferencex-run {' '.join(arguments)} failed:\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stderr.splitlines()[-1])
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--prompt", default="hi")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, rest = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    arguments = [str(options.bundle), "--prompt", options.prompt, "--max-tokens", "1", *rest]
    first_byte_seconds(arguments)
    total = [first_byte_seconds(arguments) for _ in range(options.repeat)]
    runs = [phases(arguments) for _ in range(options.repeat)]
    print(f"{options.bundle}, {platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}")
    for name in runs[0]:
        print(f"  {name:<16}{1e3 * statistics.median(run[name] for run in runs):8.0f} ms")
    print(
        f"first token     {1e3 * statistics.median(total):10.0f} ms   "
        f"({1e3 * min(total):.0f} to {1e3 * max(total):.0f}, {options.repeat} runs)"
    )


if __name__ == "__main__":
    main()

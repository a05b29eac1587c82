"""Seconds from the start of `inferencex-run` to the first token, and what they go into.

    python -m bench.startup BUNDLE [--repeat 9] [--prompt hi] [-- OPTIONS OF inferencex-run]

Every run is a process of its own, `inferencex-run BUNDLE --prompt hi --max-tokens 1`, timed from before it is started
to the first byte of its answer. The files are in the page cache and the bytecode is compiled: a first run sees to both
and is not counted. Then as many runs say how long each phase took, by `bench.startup_phases`, which makes them a little
slower. Figures are medians. "libraries alone" is a process that only imports numpy, protobuf and tokenizers and reads
the bundle's tokenizer: nothing in Python that is built on them answers sooner.
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
LIBRARIES = """
import gc, os, sys
gc.disable()
os.environ["OPENBLAS_THREAD_TIMEOUT"] = "4"  # as the command sets it, until numpy is there
import numpy, google.protobuf.message, tokenizers
tokenizers.Tokenizer.from_file(os.path.join(sys.argv[1], "tokenizer.json"))
print("ready", flush=True)
"""
ROOT = Path(__file__).resolve().parents[1]


def first_byte_seconds(arguments: Sequence[str], program: str = PLAIN) -> float:
    """Start the command and return the seconds until its answer begins; SystemExit with its errors if there is none."""
    began = time.monotonic()
    command = [sys.executable, "-c", program, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=_environment(), bufsize=0, **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        first = process.stdout.read(1)
        seconds = time.monotonic() - began
        process.stdout.read()
        errors = process.stderr.read().decode(errors="replace")
    if not first or process.returncode:
        raise SystemExit(f"python -c {program!r} {' '.join(arguments)} failed:\n{errors}")
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
    libraries = [first_byte_seconds([str(options.bundle)], LIBRARIES) for _ in range(options.repeat)]
    runs = [phases(arguments) for _ in range(options.repeat)]
    print(f"{options.bundle}, {platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}")
    for name in runs[0]:
        print(f"  {name:<16}{1e3 * statistics.median(run[name] for run in runs):8.0f} ms")
    _print_median("libraries alone", libraries)
    _print_median("first token", total)


def _print_median(title: str, seconds: list[float]) -> None:
    median, least, most = (1e3 * value for value in (statistics.median(seconds), min(seconds), max(seconds)))
    print(f"{title:<16}{median:10.0f} ms   ({least:.0f} to {most:.0f}, {len(seconds)} runs)")


if __name__ == "__main__":
    main()

"""Running tools one after the other: each conversion, and each row's logits, in a fresh process of its own."""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bench.accuracy.figures import compare, read_logits
from bench.accuracy.reference import Reference
from bench.accuracy.results import Finding
from bench.accuracy.tools import find_tool
from bench.accuracy.tools.base import Row, Task
from inferencex.runtime.backends.divergence import DivergenceSummary

ROOT = Path(__file__).resolve().parents[2]


class ProcessError(Exception):
    """A process of a tool failed. `reason` is the last line that it wrote; the message also says where the rest is."""

    def __init__(self, reason: str, rest: str = "") -> None:
        super().__init__(reason + rest)
        self.reason = reason


@dataclass(frozen=True)
class Conversion:
    """What is kept of a conversion: see `Finding`."""

    version: str
    bits: float
    seconds: float
    cpu_seconds: float
    peak_memory: int


@dataclass(frozen=True)
class Harness:
    """Measures rows.

    task:          what every tool is given
    reference:     the source on the text
    folder:        for conversions, and for what processes print
    interpreters:  of the tools that have an environment of their own
    """

    task: Task
    reference: Reference
    folder: Path
    interpreters: Mapping[str, str] = field(default_factory=dict)

    def version(self, tool: str) -> str:
        """Ask for a tool's version; ProcessError when it is not installed."""
        return str(self._ask("version", tool)["version"])

    def measure(self, tool: str, row: Row, version: str, *, again: bool) -> Finding:
        """Convert, unless that was done already, and compare; ProcessError when a process fails."""
        kept = self.folder / f"{tool}-{row.conversion}"
        conversion = self._conversion(tool, row.conversion, version, kept, again=again)
        figures = self._figures(tool, row, kept)
        return Finding(
            tool=tool,
            row=row.name,
            scheme=row.scheme,
            activations=row.activations,
            floats=row.floats,
            version=conversion.version,
            bits=conversion.bits,
            perplexity=figures.perplexity,
            mean_kl=figures.mean_kl,
            p99_kl=figures.p99_kl,
            same_top1=figures.same_top1,
            seconds=conversion.seconds,
            cpu_seconds=conversion.cpu_seconds,
            peak_memory=conversion.peak_memory,
        )

    def _conversion(self, tool: str, name: str, version: str, kept: Path, *, again: bool) -> Conversion:
        record = kept.with_name(f"{kept.name}.json")
        if record.exists() and kept.exists() and not again:
            return Conversion(**json.loads(record.read_text(encoding="utf-8")))
        record.unlink(missing_ok=True)
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        began, cpu_began = time.monotonic(), _cpu_seconds()
        peak = self._ask("convert", tool, name, self.task.dump(), kept)["peak"]
        seconds, cpu_seconds = time.monotonic() - began, _cpu_seconds() - cpu_began
        bits = self._ask("bits", tool, name, self.task.dump(), kept)["bits"]
        done = Conversion(version, bits, seconds, cpu_seconds, peak)
        record.write_text(json.dumps(asdict(done)), encoding="utf-8")
        return done

    def _figures(self, tool: str, row: Row, kept: Path) -> DivergenceSummary:
        windows = self.folder / "windows.npy"
        np.save(windows, self.reference.windows)
        pipe = self.folder / "logits.pipe"
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe)
        process, log = self._start("logits", tool, pipe, row.name, self.task.dump(), kept, windows)
        try:
            with _open_when_written(pipe, process) as stream:
                figures = compare(
                    self.reference.logits(), read_logits(stream, self.reference.windows), self.reference.windows
                )
        except EOFError as error:
            status = process.wait()
            raise (_failed(log, status) if status else ProcessError(str(error))) from error
        except ValueError as error:
            raise ProcessError(str(error)) from error
        finally:
            process.kill()
            process.wait()
            pipe.unlink()
        return figures

    def _ask(self, task: str, tool: str, *arguments: str | Path) -> dict[str, Any]:
        answer = self.folder / "answer.json"
        answer.unlink(missing_ok=True)
        process, log = self._start(task, tool, answer, *arguments)
        try:
            status = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        if status != 0:
            raise _failed(log, status)
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return found

    def _start(
        self, task: str, tool: str, answer: Path, *arguments: str | Path
    ) -> tuple[subprocess.Popen[bytes], Path]:
        # What is read back by `convert/source` is read by this environment, whatever made it.
        own = task in ("version", "convert") or find_tool(tool).runs_itself
        interpreter = self.interpreters.get(tool, sys.executable) if own else sys.executable
        log = self.folder / f"{tool}.{arguments[0]}.{task}.log" if arguments else self.folder / f"{tool}.{task}.log"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "OMP_NUM_THREADS": str(self.task.threads),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        command = [interpreter, "-m", "bench.accuracy.worker", task, tool, answer, *arguments]
        with log.open("wb") as output:
            return subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=self.folder), log


def _cpu_seconds() -> float:
    """Processor time of all child processes that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _open_when_written(pipe: Path, process: subprocess.Popen[bytes]) -> BinaryIO:
    """Open a pipe for reading once `process` writes to it, or has ended and never will."""
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    while process.poll() is None and not select.select([descriptor], [], [], 0.2)[0]:
        pass
    return os.fdopen(descriptor, "rb")


def _failed(log: Path, status: int) -> ProcessError:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    reason = f"{lines[-1][:300] if lines else 'it printed nothing'} (status {status})"
    return ProcessError(reason, f"; all that it wrote is in {log}")

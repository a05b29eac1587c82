"""Running the engines one after the other, each task in a fresh process of the engine's own interpreter."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.columns import COLUMNS, Column, capacity_for
from bench.engines.base import Capacity
from bench.models import Model
from bench.results import EngineResult
from bench.sampling import Figure, Patience, sample
from bench.worker import Job

ROOT = Path(__file__).resolve().parents[1]
TOKEN_IDS = "token_ids.json"


class WorkerError(Exception):
    """A worker's process failed; the message ends with the last line that it wrote."""


@dataclass(frozen=True)
class Workers:
    """How to start workers.

    interpreters:  interpreter of each engine that needs one of its own
    threads:       threads of each engine
    patience:      how often and how long each figure is sampled
    logs:          folder for what workers print
    """

    threads: int
    patience: Patience
    logs: Path
    interpreters: Mapping[str, str] = field(default_factory=dict)

    def call(self, task: str, engine: str, *arguments: str | Path) -> list[dict[str, Any]]:
        """Run one task and return its answers; WorkerError when it fails. What it prints goes to a log."""
        answers = self.logs / f"{engine}.{task}.jsonl"
        answers.unlink(missing_ok=True)
        log = self.logs / f"{engine}.{task}.log"
        interpreter = self.interpreters.get(engine, sys.executable)
        environment = {
            # Packages are installed with their bytecode; what runs from its sources gets it in the run that is not
            # counted, and keeps it.
            **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "OMP_NUM_THREADS": str(self.threads),
            "HF_HUB_OFFLINE": "1",
        }
        command = [interpreter, "-m", "bench.worker", task, engine, answers, *arguments]
        with log.open("wb") as output:
            status = subprocess.run(command, stdout=output, stderr=output, env=environment, cwd=ROOT).returncode
        found = [json.loads(line) for line in answers.read_text().splitlines()] if answers.exists() else []
        if status != 0 and task != "measure":
            raise WorkerError(_last_words(log, status))
        if status != 0:
            found.append({"failure": _last_words(log, status)})
        return found

    def probe(self, engine: str) -> EngineResult:
        """Ask an engine for its version; WorkerError when it is not installed."""
        return EngineResult(**self.call("version", engine)[0])

    def prepare(self, engine: str, version: str, checkpoint: Path, folder: Path, anew: bool = False) -> None:
        """Make the engine's model, unless this version of the engine already made it, or always if `anew`."""
        stamp = folder.with_name(f"{folder.name}.version")
        if not anew and folder.exists() and stamp.exists() and stamp.read_text() == version:
            return
        partial = folder.with_name(f"{folder.name}.partial")
        for leftover in (partial, folder):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=True)
        self.call("prepare", engine, checkpoint, partial)
        partial.rename(folder)
        stamp.write_text(version)

    def measure(
        self, engine: str, folder: Path, checkpoint: Path, columns: Sequence[Column], into: EngineResult
    ) -> None:
        """Measure the columns that an engine can be asked for, and put them into its result."""
        sessions = [column for column in columns if column.needs_session]
        wanted = {column.name for column in columns}
        if "disk" in wanted:
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            into.figures["disk"] = Figure(size / 1e6, 1, False)
        if "first-token" in wanted:
            into.figures["first-token"] = self._first_token(engine, folder, checkpoint)
        if sessions:
            job = self._job(sessions, checkpoint, capacity_for(sessions, self.threads))
            for answer in self.call("measure", engine, folder, job.dump()):
                if "failure" in answer:
                    into.failure = answer["failure"]
                elif answer["column"] in wanted:
                    into.figures[answer["column"]] = Figure(answer["value"], answer["samples"], answer["disturbed"])

    def _first_token(self, engine: str, folder: Path, checkpoint: Path) -> Figure:
        column = COLUMNS["first-token"]
        job = self._job([column], checkpoint, capacity_for([column], self.threads)).dump()

        def take() -> float:
            began = time.monotonic()
            return float(self.call("first-token", engine, folder, job)[0]["monotonic"]) - began

        take()
        return sample(take, self.patience)

    def _job(self, columns: Sequence[Column], checkpoint: Path, capacity: Capacity) -> Job:
        return Job(
            columns=tuple(column.name for column in columns),
            capacity=capacity,
            token_ids=str(checkpoint / TOKEN_IDS),
            repeat=self.patience.repeat,
            seconds=self.patience.seconds,
            idle=self.patience.idle,
        )


def ensure_checkpoint(model: Model, folder: Path) -> Path:
    """Return the checkpoint that all engines' models are made from, making it first where it is missing."""
    checkpoint = folder / model.name / "checkpoint"
    if not checkpoint.exists():
        from bench.checkpoints import make_checkpoint

        partial = checkpoint.with_name("checkpoint.partial")
        shutil.rmtree(partial, ignore_errors=True)
        make_checkpoint(model, partial)
        partial.rename(checkpoint)
    return checkpoint


def _last_words(log: Path, status: int) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1][:300] if lines else 'it printed nothing'} (status {status}; all of it is in {log})"

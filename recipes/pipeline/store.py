"""The work directory: the finished steps of pipelines, each in a folder named by what it was made from.

A step works in a folder `KIND.NAME.KEY.partial`, which takes the name `KIND.NAME.KEY` when the step's record is in it:
that one rename is what makes a step finished.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from inferencex.formats.errors import RecipeError
from inferencex.recipes.pipeline.base import Finished, Outcome, Step
from inferencex.recipes.pipeline.hashing import HashCache, visible_files

RECORD_FILE = "step.json"
LOG_FILE = "log.txt"
USAGE_FILE = "usage.json"
_BESIDE = (RECORD_FILE, LOG_FILE, USAGE_FILE)
_SECONDS_TO_WAIT = 10.0
_KEY_DIGITS = 16


@dataclass(frozen=True)
class Record:
    """What is kept of a finished step.

    seconds:      how long it took, of the run that finished it
    peak_memory:  bytes, 0 where it was not measured
    files:        size and sha256 of every output
    """

    step: str
    key: str
    digest: str
    passed: bool
    facts: dict[str, Any]
    seconds: float
    peak_memory: int
    files: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def disk(self) -> int:
        """Bytes of the outputs."""
        return sum(int(size) for size, _ in self.files.values())


class Store:
    """A locked work directory."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock: int | None = None
        self.steps = self.path / "steps"
        self.hashes = HashCache(self.path / "hashes.json")

    def lock(self) -> int:
        """Take the directory for this run, and return the lock's file descriptor for children to hold as well.

        The lock is the kernel's and dies with the last process that holds it. Raises RecipeError when another run
        keeps it.
        """
        self.steps.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        give_up = time.monotonic() + _SECONDS_TO_WAIT
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                # The children of a run that was killed are about to end; a run that lives is another matter.
                if time.monotonic() > give_up:
                    os.close(lock)
                    raise RecipeError(
                        f"{self.path}: another pipeline works there; wait for it, or give another --work-dir"
                    ) from error
                time.sleep(0.05)
        self._lock = lock
        return lock

    def close(self) -> None:
        """Keep what is known about files, and let the directory go."""
        if self._lock is not None:
            self.hashes.save()
            os.close(self._lock)
            self._lock = None

    def folder(self, step: Step, key: str) -> Path:
        """Return where the finished step is, or will be."""
        return self.steps / f"{step.kind}.{step.name.replace(':', '.')}.{key[:_KEY_DIGITS]}"

    def partial(self, step: Step, key: str) -> Path:
        """Return the folder that the step works in, made if it is not there."""
        folder = self.folder(step, key)
        if folder.exists():
            shutil.rmtree(folder)  # damaged, or else it would have been found
        partial = folder.with_name(folder.name + ".partial")
        partial.mkdir(exist_ok=True)
        return partial

    def find(self, step: Step, key: str) -> tuple[Finished, Record] | None:
        """Return the finished step if it is there with all its outputs as they were."""
        folder = self.folder(step, key)
        record = _read_record(folder / RECORD_FILE)
        if record is None or record.key != key:
            return None
        for name, (size, digest) in record.files.items():
            file = folder / name
            if not file.is_file() or file.stat().st_size != size or self.hashes.digest(file) != digest:
                return None
        finished = Finished(folder, Outcome(record.digest, record.facts, record.passed))
        return (finished, record) if step.still_there(finished) else None

    def keep(self, step: Step, key: str, outcome: Outcome, seconds: float) -> tuple[Finished, Record]:
        """Make the step that worked in its partial folder a finished one."""
        folder = self.folder(step, key)
        partial = folder.with_name(folder.name + ".partial")
        names = [path.relative_to(partial).as_posix() for path in visible_files(partial)]
        files = {
            name: [(partial / name).stat().st_size, self.hashes.digest(partial / name)]
            for name in names
            if name not in _BESIDE
        }
        peak = _peak_memory(partial / USAGE_FILE)
        record = Record(step.id, key, outcome.digest, outcome.passed, outcome.facts, round(seconds, 3), peak, files)
        with (partial / RECORD_FILE).open("w", encoding="utf-8") as handle:
            # Facts keep their order, for what is made of them later must be as if it had been made at once.
            json.dump(asdict(record), handle, indent=1)
            handle.flush()
            os.fsync(handle.fileno())
        partial.rename(folder)
        return Finished(folder, outcome), record

    def earlier(self, step: Step) -> Record | None:
        """Return the record of the step's latest run on whatever inputs, for estimates."""
        pattern = f"{step.kind}.{step.name.replace(':', '.')}.{'[0-9a-f]' * _KEY_DIGITS}/{RECORD_FILE}"
        found = sorted(self.steps.glob(pattern), key=lambda path: path.stat().st_mtime)
        return _read_record(found[-1]) if found else None


def _read_record(path: Path) -> Record | None:
    if not path.is_file():
        return None
    try:
        return Record(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        return None  # of another version, or damaged: the step is done again


def _peak_memory(path: Path) -> int:
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["peak_memory"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0  # the command ended without writing it

"""Hashes of files, remembered by size and time of change, and hashes of JSON."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any


def json_digest(value: Any) -> str:
    """Return the sha256 of a JSON value; equal values give equal digests."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


class HashCache:
    """sha256 of files, kept in a JSON file so that an unchanged file is read once.

    A file counts as unchanged while its size, inode and time of change are the same.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known: dict[str, list[Any]] = {}
        if path is not None and path.is_file():
            try:
                known = json.loads(path.read_text(encoding="utf-8"))
            except ValueError:
                known = {}  # cut off while it was written; the files are read again
            self._known = known if isinstance(known, dict) else {}

    def digest(self, path: Path) -> str:
        """Return the sha256 of the file at `path`, links followed."""
        real = os.path.realpath(path)
        status = os.stat(real)
        mark = [status.st_size, status.st_mtime_ns, status.st_ino]
        with self._lock:
            known = self._known.get(real)
        if known is not None and known[:3] == mark:
            return str(known[3])
        digest = file_digest(Path(real))
        with self._lock:
            self._known[real] = [*mark, digest]
        return digest

    def tree(self, folder: Path) -> dict[str, str]:
        """Return the sha256 of every file below `folder` by its name relative to it, hidden ones left out."""
        return {path.relative_to(folder).as_posix(): self.digest(path) for path in visible_files(folder)}

    def save(self) -> None:
        """Write what is known to the cache's file, if it has one."""
        if self._path is None:
            return
        with self._lock:
            text = json.dumps(self._known)
        partial = self._path.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(self._path)


def visible_files(folder: Path) -> list[Path]:
    """Return the files below `folder` in the order of their names, without hidden files and folders."""
    found = []
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(parent, name) for name in files if not name.startswith(".")]
    return sorted(found)
